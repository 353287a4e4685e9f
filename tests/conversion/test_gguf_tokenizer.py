"""Tokenizers in GGUF files; also bad requests, overwriting and killed processes of folds to GGUF."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import transformers
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

import crosshead
from broken import Case, config, leaves_nothing, remove, run
from crosshead.common.errors import ConversionError
from crosshead.conversion.gguf.store import OLDEST_TRANSFORMERS, GgufStore, write_side_files
from tiers import first
from toy_checkpoints import character_tokenizer

gguf = pytest.importorskip("gguf")
toy = pytest.importorskip("gguf_tokenizers")

TEXT = "The lower  towers' 1234 in\n\n  the   low <think>low</s> they'll 56\u00e9\u4e16 end\n"
KINDS = {
    **{pre: lambda pre=pre: toy.bpe(pre) for pre in toy.PRE},
    **{prefix: lambda prefix=prefix: toy.sentencepiece(prefix) for prefix in ("Metaspace", "Prepend", "Replace")},
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def read_metadata(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def fold_and_read_metadata(folder, tokenizer, **changes):
    made = toy.write_mixed(folder / "made", tokenizer=tokenizer, **changes)
    crosshead.fold(made, folder / "x.gguf", verify=False)
    return read_metadata(folder / "x.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_written_metadata_describe_the_tokenizer(kind, tmp_path):
    tokenizer = KINDS[kind]()
    metadata = fold_and_read_metadata(tmp_path, tokenizer)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == toy.VOCABULARY
    assert all(tokens[index] == token for token, index in tokenizer.get_vocab().items())
    assert tokens[-1] == f"[PAD{toy.VOCABULARY - 1}]" and metadata["tokenizer.ggml.token_type"][-1] == UNUSED
    assert metadata["tokenizer.ggml.pre"] == (kind if kind in toy.PRE else "default")
    assert metadata["tokenizer.ggml.bos_token_id"] == tokenizer.bos_token_id
    assert not metadata["tokenizer.ggml.add_bos_token"] and not metadata["tokenizer.ggml.add_eos_token"]
    assert metadata["tokenizer.ggml.add_space_prefix"] is (kind in ("Metaspace", "Prepend"))


@pytest.mark.parametrize("kind", KINDS)
def test_written_tokenizer_is_read_back_with_same_ids(kind, tmp_path):
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
        pytest.skip(f"transformers {transformers.__version__} reads tokenizers of GGUF files wrongly")
    # transformers reads "Prepend" as "Metaspace", which adds no space after a special token.
    text, tokenizer = TEXT.replace("</s>", "") if kind == "Prepend" else TEXT, KINDS[kind]()
    crosshead.fold(toy.write_mixed(tmp_path / "made", tokenizer=tokenizer), tmp_path / "x.gguf", verify=False)
    write_side_files(GgufStore(tmp_path / "x.gguf"), tmp_path / "side")
    read = AutoTokenizer.from_pretrained(tmp_path / "side")
    for words in (text, "low", " low er"):
        if kind != "Prepend" or not words.startswith(" "):
            assert read(words).input_ids == tokenizer(words).input_ids
    if kind == "Replace":
        assert read.decode(read(" low er").input_ids) == " low er"


def test_token_types_of_bpe_vocabulary(tmp_path):
    metadata = fold_and_read_metadata(tmp_path, toy.bpe())
    types = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    assert (types["<s>"], types["</s>"], types["<think>"], types["low"]) == (CONTROL, CONTROL, USER_DEFINED, NORMAL)
    assert metadata["tokenizer.ggml.model"] == "gpt2" and "tokenizer.ggml.scores" not in metadata
    assert metadata["tokenizer.ggml.merges"][:3] == ["l o", "lo w", "e r"]


def test_token_types_and_scores_of_sentencepiece_vocabulary(tmp_path):
    metadata = fold_and_read_metadata(tmp_path, toy.sentencepiece())
    tokens = metadata["tokenizer.ggml.tokens"]
    types = dict(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    assert (types["<unk>"], types["<s>"], types["<0x0A>"], types["low"]) == (UNKNOWN, CONTROL, BYTE, NORMAL)
    assert metadata["tokenizer.ggml.model"] == "llama" and metadata["tokenizer.ggml.unknown_token_id"] == 0
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    merged = ["".join(pair) for pair in toy.MERGES]
    assert sorted(scores, key=lambda token: -scores[token])[: len(merged)] == merged


@pytest.mark.parametrize(("start", "end"), [("<s> ", ""), ("", " </s>"), ("<s> ", " </s>")])
def test_add_bos_and_add_eos_follow_post_processor(start, end, tmp_path):
    tokenizer = toy.bpe()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start}$A{end}", special_tokens=special
    )
    metadata = fold_and_read_metadata(tmp_path, tokenizer)
    assert metadata["tokenizer.ggml.add_bos_token"] is bool(start)
    assert metadata["tokenizer.ggml.add_eos_token"] is bool(end)


def test_config_special_ids_replace_missing_tokenizer_ids(tmp_path):
    tokenizer = toy.bpe()
    tokenizer.bos_token = None
    metadata = fold_and_read_metadata(tmp_path, tokenizer, bos_token_id=5, eos_token_id=[1, 2], pad_token_id=7)
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    assert ids == {"bos": 5, "eos": tokenizer.eos_token_id, "padding": 7, "unknown": None}


@pytest.mark.parametrize("templates", ["{{ 1 }}", {"default": "{{ 1 }}", "tool-use": "{{ 2 }}"}])
def test_chat_templates_are_written(templates, tmp_path):
    tokenizer = toy.bpe()
    tokenizer.chat_template = templates
    metadata = fold_and_read_metadata(tmp_path, tokenizer)
    assert metadata["tokenizer.chat_template"] == "{{ 1 }}"
    if isinstance(templates, dict):
        assert metadata["tokenizer.chat_templates"] == ["tool_use"]
        assert metadata["tokenizer.chat_template.tool_use"] == "{{ 2 }}"


def read_back(tmp_path, tokenizer):
    fold_and_read_metadata(tmp_path, tokenizer)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
        pytest.skip("this version of transformers reads no tokenizers of GGUF files")
    write_side_files(GgufStore(tmp_path / "x.gguf"), tmp_path / "side")
    return AutoTokenizer.from_pretrained(tmp_path / "side")


def test_reading_adds_no_token_to_vocabulary(tmp_path):
    """transformers would add `<|endoftext|>` after the vocabulary."""
    tokenizer = toy.bpe()
    read = read_back(tmp_path, tokenizer)
    text = "low<|endoftext|>er"
    assert read(text).input_ids == tokenizer(text).input_ids
    assert len(read) <= toy.VOCABULARY and set(tokenizer.get_vocab()) <= set(read.get_vocab())


def test_added_tokens_with_spaces_round_trip(tmp_path):
    tokenizer = toy.bpe()
    tokenizer.add_tokens([AddedToken("low er", normalized=False), AddedToken("   ", normalized=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end of turn>"]})
    read = read_back(tmp_path, tokenizer)
    for text in ("a low er1   b", "low <end of turn>low er", " low"):
        assert read(text).input_ids == tokenizer(text).input_ids
        assert read.decode(read(text).input_ids) == text


def test_chat_templates_are_read(tmp_path):
    tokenizer = toy.bpe()
    for templates in ("{{ 1 }}", {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}):
        tokenizer.chat_template = templates
        folder = tmp_path / type(templates).__name__
        assert read_back(folder, tokenizer).chat_template == templates


def save_with_replaced_parts(**parts):
    """Return a function that saves a tokenizer with some of its parts replaced."""

    def damage(folder):
        tokenizer = toy.bpe()
        for name, value in parts.items():
            setattr(tokenizer.backend_tokenizer, name, value)
        tokenizer.save_pretrained(folder)

    return damage


def create_beside(name, content=b""):
    """Return a function that makes a file beside the source, or a folder if `content` is None."""

    def make(folder):
        path = folder.parent / name
        path.mkdir() if content is None else path.write_bytes(content)

    return make


FOLD = "fold source x.gguf"
ROUTED = {"mixture": {"shared_heads": 1, "active_heads": 3, "router": "query_norm", "gate": "binary"}}
SPLIT = pre_tokenizers.Split(" ", "isolated")
BAD = {
    "unknown type": Case("'q9_9'", command=f"{FOLD} --type q9_9"),
    "k-quants": Case("use one of f32, f16, bf16, q8_0", command=f"{FOLD} --type q4_k_m"),
    "upper case": Case("'Q8_0'", command=f"{FOLD} --type Q8_0"),
    "a folder with a type": Case("ends in .gguf", command="fold source x --type q8_0"),
    "another suffix": Case("ends in .gguf", command="fold source x.bin --type q8_0"),
    "a file": Case("--overwrite", create_beside("x.gguf", b"GGUF"), FOLD),
    "a folder in its place": Case("is a folder", create_beside("x.gguf", None), f"{FOLD} --overwrite"),
    "another file": Case("does not begin with GGUF", create_beside("x.gguf", b"text"), f"{FOLD} --overwrite"),
    "a record": Case("x.gguf.conversion.json", create_beside("x.gguf.conversion.json"), FOLD),
    "a folder in the record's place": Case(
        "x.gguf.conversion.json", create_beside("x.gguf.conversion.json", None), f"{FOLD} --overwrite"
    ),
    "in the source": Case("overlaps", command="fold source source/x.gguf"),
    "under a file": Case("file/x.gguf", create_beside("file"), "fold source file/x.gguf"),
    "unknown tensors": Case("not part of this model type", config(model_type="llama", mixers=...), FOLD),
    "what cannot be folded": Case("'mixture' in layer 0", config(mixers=toy.MIXERS | ROUTED), FOLD),
    "no tokenizer": Case("tokenizer", remove("tokenizer.json"), FOLD),
    "words": Case("WordLevel", lambda folder: character_tokenizer().save_pretrained(folder), FOLD),
    "another split": Case("'Split'", save_with_replaced_parts(pre_tokenizer=SPLIT), FOLD),
    "a normaliser": Case("Lowercase", save_with_replaced_parts(normalizer=normalizers.Lowercase()), FOLD),
    "a long vocabulary": Case("ends at 99", lambda folder: toy.write_mixed(folder, vocab_size=100), FOLD),
    "dry run": Case("WordLevel", lambda folder: character_tokenizer().save_pretrained(folder), f"{FOLD} --dry-run"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    toy.write_mixed(folder / "one")
    return folder


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_gguf_fold_gives_one_line_error_and_no_files(case, bases, tmp_path, capfd, monkeypatch):
    leaves_nothing(case, bases, tmp_path, capfd, monkeypatch)


def test_fold_command_writes_and_overwrites_gguf(bases, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capfd, monkeypatch, ["fold", str(bases / "one"), "new/x.gguf", "--type", "q8_0"])
    assert (status, sorted(path.name for path in (tmp_path / "new").iterdir())) == (
        0,
        ["x.gguf", "x.gguf.conversion.json"],
    )
    assert "F16 because" in out and out.endswith("wrote new/x.gguf\n")
    before = (tmp_path / "new" / "x.gguf").read_bytes()
    command = ["fold", str(bases / "one"), "new/x.gguf", "--type", "f32", "--overwrite", "--no-verify", "--json"]
    status, out, _ = run(capfd, monkeypatch, command)
    assert status == 0 and json.loads(out)["gguf"]["type"] == "f32"
    assert (tmp_path / "new" / "x.gguf").read_bytes() != before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_failed_fold_leaves_existing_files_unchanged(error, bases, tmp_path, monkeypatch):
    crosshead.fold(bases / "one", tmp_path / "x.gguf", verify=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_):
        raise error

    monkeypatch.setattr("crosshead.conversion.gguf.writer._rounded", fail)
    for target in ("x.gguf", "new/y.gguf"):
        with pytest.raises((KeyboardInterrupt, ConversionError)):
            crosshead.fold(bases / "one", tmp_path / target, overwrite=True, verify=False)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


KILLED = """
import os, signal, sys
import crosshead
from crosshead.conversion.gguf import writer
from crosshead.conversion.writing import atomic_file
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "while it writes":
    writer.interleaved = kill
else:
    from pathlib import Path
    replace, record = Path.replace, "x.gguf.conversion.json"
    Path.replace = lambda path, target: kill() if path.name == target.name == record else replace(path, target)
crosshead.fold(sys.argv[1], sys.argv[2], verify=False)
"""


@pytest.mark.parametrize("moment", first(["while it writes", "between file and record"]))
def test_killed_fold_is_completed_by_next_run(moment, bases, tmp_path):
    target, record = tmp_path / "x.gguf", tmp_path / "x.gguf.conversion.json"
    work = tmp_path / ".x.gguf.crosshead-partial"
    command = [sys.executable, "-P", "-c", KILLED, bases / "one", target, moment]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert work.exists() and not record.exists()
    if moment == "while it writes":
        assert not target.exists()
        crosshead.fold(bases / "one", target, verify=False)
    else:
        with pytest.raises(ConversionError, match="--overwrite"):
            crosshead.fold(bases / "one", target, verify=False)  # it moves the record first
    GgufStore(target)
    assert json.loads(record.read_text())["command"] == "fold"
    assert not work.exists()
