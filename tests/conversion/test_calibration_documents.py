"""Calibration on JSON lines, conversations and datasets gives the weights of a text file of the same content."""

import json
import sys
from itertools import pairwise

import datasets
import pytest
from safetensors.torch import load_file

import crosshead
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration import documents
from crosshead.conversion.calibration.documents import read_documents
from crosshead.conversion.calibration.text import Text, default_text
from crosshead.conversion.options import read_recipe
from crosshead.conversion.sources.resolve import open_source
from toy_checkpoints import character_tokenizer, write_stock

TEXTS = [default_text()[start : start + 3000] for start in range(0, 30000, 3000)]
CHATS = [[{"role": "user", "content": text[:900]}, {"role": "assistant", "content": text[900:]}] for text in TEXTS]
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
MIXERS = {"mixture": {"active_heads": 2}}


def format_messages(messages):
    return "".join(f"[{message['role']}] {message['content']}\n" for message in messages)


def write_lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "source"
    write_stock(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def documents_and_text(request, tmp_path, monkeypatch):
    """The `calibration` argument of a conversion, and its content as one text."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts, chats = [{"text": text} for text in TEXTS], [{"messages": chat, "text": "not this"} for chat in CHATS]
    lines = write_lines(tmp_path / "copy" / "train.jsonl", chats if "chat" in request.param else texts)
    content = "\n\n".join(map(format_messages, CHATS) if "chat" in request.param else TEXTS)
    return f"datasets:{tmp_path / 'copy'}" if "dataset" in request.param else lines, content


@pytest.mark.parametrize("documents_and_text", ["lines", "chat", "dataset", "dataset of chats"], indirect=True)
def test_documents_give_same_weights_as_text_file(documents_and_text, source, tmp_path):
    calibration, content = documents_and_text
    (tmp_path / "text.txt").write_text(content)
    options = {"verify": False}
    crosshead.convert(source, tmp_path / "expected", MIXERS, calibration=tmp_path / "text.txt", **options)
    report = crosshead.convert(source, tmp_path / "made", MIXERS, calibration=calibration, **options)
    expected, made = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "made"))
    assert all(tensor.equal(made[name]) for name, tensor in expected.items())
    assert report["calibration"]["text"] == (str(calibration) if isinstance(calibration, str) else "train.jsonl")


@pytest.mark.parametrize("name", ["datasets:OWNER/SET", "datasets:OWNER/SET:en", "datasets:OWNER/SET:en:test"])
def test_dataset_name_sets_load_dataset_arguments(name, source, tmp_path, monkeypatch):
    calls = []

    def load_dataset(*names, **options):
        calls.append((names, options))
        return datasets.Dataset.from_dict({"text": TEXTS, "number": range(len(TEXTS))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(documents, "CHARACTERS", 7000)
    opened = open_source(source, scratch=tmp_path)
    text = Text.of(tmp_path.__class__(name), opened)
    subset, split = {1: (None, "train"), 2: ("en", "train"), 3: ("en", "test")}[name.count(":")]
    assert calls == [(("OWNER/SET", subset), {"split": split, "streaming": True})]
    assert text.documents == "\n\n".join(TEXTS[:3])  # the first rows, up to CHARACTERS
    assert text.described()["text"] == name


@pytest.mark.parametrize("padding", [0, 5000], ids=["short lines", "other fields"])
def test_long_file_is_sampled_evenly_up_to_character_limit(padding, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHARACTERS", 10_000)
    rows = [{"text": f"{number:04} ".ljust(100, "x"), "other": " " * padding} for number in range(180)]
    content = read_documents(write_lines(tmp_path / "long.jsonl", rows), None)
    read = [int(document[:4]) for document in content.split("\n\n")]
    assert len(read) == 100 and read == sorted(read)
    assert max(after - before for before, after in pairwise(read)) <= 3
    assert read[0] <= 3 and read[-1] >= 176


def test_recipe_calibration_is_dataset_or_path(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("mixers: {explicit: {}}\ncalibration: datasets:OWNER/SET\n")
    assert str(read_recipe(recipe)["calibration"]) == "datasets:OWNER/SET"
    recipe.write_text("mixers: {explicit: {}}\ncalibration: text.jsonl\n")
    assert read_recipe(recipe)["calibration"] == tmp_path / "text.jsonl"


BAD = {
    "no JSON": ("a: b", "line 1"),
    "no object": ("[1]", r"\[1\]"),
    "another field": ('{"body": "a"}', "'body'"),
    "no text": ('{"text": 3}', "'text'"),
    "null": ('{"text": null}', "'text'"),
    "nothing": ('{"text": ""}', "no text"),
    "no message": ('{"messages": 3}', "line 1"),
    "half a surrogate": ('{"text": "w1 \\ud800"}', "line 1 "),
    "half a surrogate in a message": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1 "),
    "half a message": ('{"messages": [{"role": "user"}, 1]}', "line 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_jsonl_gives_one_line_error(case, tmp_path):
    content, words = BAD[case]
    (tmp_path / "bad.jsonl").write_text(f"{content}\n")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '' }}{% endfor %}"
    with pytest.raises(ConversionError, match=words) as error:
        read_documents(tmp_path / "bad.jsonl", tokenizer)
    assert "\n" not in str(error.value)


def test_suffix_of_json_lines_may_be_upper_case(source, tmp_path):
    lines = write_lines(tmp_path / "texts.JSONL", [{"text": text} for text in TEXTS])
    assert Text.of(lines, open_source(source, scratch=tmp_path)).documents == "\n\n".join(TEXTS)


def test_conversations_without_chat_template_are_refused(tmp_path):
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(ConversionError, match="chat template"):
        read_documents(lines, character_tokenizer())
    both = write_lines(tmp_path / "both.jsonl", [{"messages": CHATS[0], "text": TEXTS[0]}])
    assert read_documents(both, character_tokenizer()) == TEXTS[0]


@pytest.mark.parametrize("name", ["datasets:", "datasets:a:b:c:d", "datasets:no/such/folder"])
def test_missing_dataset_gives_one_line_error(name, source, tmp_path):
    with pytest.raises(ConversionError, match=r"no/such/folder|datasets:") as error:
        crosshead.convert(source, tmp_path / "made", MIXERS, calibration=name)
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


def test_missing_datasets_library_names_pip_install(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConversionError, match="pip install"):
        crosshead.convert(source, tmp_path / "made", MIXERS, calibration="datasets:OWNER/SET")
