import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.text import Text
from crosshead.conversion.gguf import store as gguf_tokenizer
from crosshead.conversion.sources.resolve import open_source
from crosshead.conversion.sources.safetensors_store import WEIGHTS
from toy_checkpoints import write_model
from toy_tokenizer import toy_tokenizer

SIDE = ["LICENSE.txt", "USE_POLICY.md", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NEVER = ["README.md", "modeling_toy.py", "training_args.bin", "optimizer.pt", "conversion.json", "LICENSE.py"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "toy"
    toys.stock_model("Llama").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    for name in [*SIDE[:2], *NEVER]:
        (folder / name).write_text("text")
    return folder


@pytest.mark.parametrize("has_head", [True, False])
def test_decoder_saved_as_base_model_converts(has_head, tmp_path):
    """Embedding models have tensor names without "model."; transformers adds it, too."""
    stock = toys.stock_model("Qwen3", tie_word_embeddings=not has_head)
    write_model(stock, tmp_path / "source")
    tensors = load_file(tmp_path / "source" / WEIGHTS)
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert ("lm_head.weight" in renamed) == has_head and "norm.weight" in renamed
    save_file(renamed, tmp_path / "source" / WEIGHTS, {"format": "pt"})
    report = crosshead.convert(tmp_path / "source", tmp_path / "model", {"gating": {}})
    assert report["verification"]["must_equal"] and report["verification"]["greatest_logit_difference"] == 0
    crosshead.fold(tmp_path / "model", tmp_path / "back", verify=False)
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "toy")


@pytest.fixture
def gguf_file(tmp_path):
    toys_of_gguf = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < gguf_tokenizer.OLDEST_TRANSFORMERS:
        pytest.skip("this transformers gets the tokenizers of GGUF files wrong")
    return toys_of_gguf.write_model(tmp_path / "models" / "toy.gguf", toys_of_gguf.model("Qwen3"), "Qwen3")


def test_folder_source_lists_config_files_and_tensors(folder, tmp_path):
    source = open_source(str(folder), scratch=tmp_path / "scratch")
    assert source.config == json.loads((folder / "config.json").read_text())
    assert source.origin == {"kind": "folder", "name": "toy"}
    assert sorted(file.name for file in source.files) == SIDE
    assert source.store.entries["model.norm.weight"].shape == (24,)
    assert not source.dropped
    assert not (tmp_path / "scratch").exists()


def test_relative_home_and_symlinked_folders_are_opened(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (".", "../toy", "~/toy", folder):
        source = open_source(name, scratch=tmp_path / "scratch")
        assert source.origin["name"] == "toy"
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    linked = open_source(tmp_path / "snapshot", scratch=tmp_path / "scratch")
    assert sorted(file.name for file in linked.files) == SIDE
    assert linked.store.read("model.norm.weight").equal(source.store.read("model.norm.weight"))


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors", "tokenizer.json"])
def test_fingerprint_changes_with_source_files(folder, tmp_path, changed):
    before = open_source(folder, scratch=tmp_path).fingerprint
    assert open_source(folder, scratch=tmp_path).fingerprint == before
    if changed == "config.json":
        content = json.loads((folder / changed).read_text()) | {"rope_theta": 5.0}
        (folder / changed).write_text(json.dumps(content))
    else:
        os.utime(folder / changed, (1, 1))
    assert open_source(folder, scratch=tmp_path).fingerprint != before


def test_chat_templates_are_listed_and_code_among_them_is_refused(folder, tmp_path):
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ messages }}")
    assert templates in open_source(folder, scratch=tmp_path).files
    (templates / "tools.py").write_text("")
    with pytest.raises(ConversionError, match=r"tools\.py"):
        open_source(folder, scratch=tmp_path)


@pytest.mark.parametrize("files", [("tokenizer.model",), ("vocab.json", "merges.txt"), ("tokenizer.json",)])
def test_every_kind_of_tokenizer_file_is_accepted(folder, tmp_path, files):
    (folder / "tokenizer.json").unlink()
    for name in files:
        with pytest.raises(ConversionError, match="tokenizer"):
            open_source(folder, scratch=tmp_path)
        (folder / name).write_text("{}")
    assert set(files) <= {file.name for file in open_source(folder, scratch=tmp_path).files}


CONFIGS = {
    "empty": (b"", "JSON"),
    "not JSON": (b"{'model_type': 1}", "JSON"),
    "a list": (b"[1]", r"\[1\]"),
    "not UTF-8": (b'{"a": "\xff"}', "JSON"),
    "deeply nested": (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "nested"),
    "a number of many digits": (b'{"a": ' + b"1" * 10_000 + b"}", "JSON"),
    "huge": (b" " * 10_000_001, "10000001 bytes"),
}


@pytest.mark.parametrize(("content", "message"), CONFIGS.values(), ids=CONFIGS)
def test_unreadable_config_is_refused(folder, tmp_path, content, message):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConversionError, match=rf"config\.json .*{message}") as caught:
        open_source(folder, scratch=tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_invalid_source_paths_are_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "config.json")
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for source, message in {
        "": "''",
        "./none": "'./none'",
        "~/none/toy": "'~/none/toy'",
        "a/b/c": "'a/b/c'",
        "a\\b": "a.*b",
        "org/toy.gguf": r"'org/toy\.gguf'",
        tmp_path / "none": f"{tmp_path}/none",
        "x" * 5000: "xxx.*Hub",
        "two words": "'two words'.*Hub",
        "org/--toy": "'org/--toy'.*Hub",
        tmp_path / "empty": r"empty.*config\.json",
        tmp_path / "piped": r"piped.*config\.json.*not a file",
        folder / "model.safetensors": r"model\.safetensors.*GGUF",
        pickled: "pickle",
    }.items():
        with pytest.raises(ConversionError, match=message) as caught:
            open_source(source, scratch=tmp_path / "scratch")
        assert "\n" not in str(caught.value)
    with pytest.raises(ConversionError, match="revision='main'"):
        open_source(folder, "main", scratch=tmp_path)


@pytest.mark.parametrize("whole_folder", [False, True])
def test_gguf_source_provides_config_and_tokenizer_files(gguf_file, tmp_path, whole_folder):
    (gguf_file.parent / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}'
    )
    source = open_source(gguf_file.parent if whole_folder else gguf_file, scratch=tmp_path / "scratch")
    assert source.origin == {"kind": "gguf", "name": "toy.gguf"}
    assert source.config["model_type"] == "qwen3"
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert {file.name for file in source.files} == names
    folder = tmp_path / "published"
    folder.mkdir()
    for file in source.files:
        assert str(tmp_path) not in file.read_text()
        shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab c<|endoftext|>").input_ids == [5, 4, 3, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 0, 61)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    assert open_source(gguf_file, scratch=tmp_path / "other").fingerprint == source.fingerprint


@pytest.mark.parametrize(("facts", "first"), [({}, 0), ({"add_bos_token": 0}, 0), ({"add_bos_token": 1}, 1)])
def test_gguf_add_bos_token_adds_first_token(gguf_file, tmp_path, facts, first):
    import gguf_toys

    metadata = {f"tokenizer.ggml.{key}": value for key, value in facts.items()}
    gguf_toys.write_model(gguf_file, gguf_toys.model("Llama"), "Llama", **metadata)
    source = open_source(gguf_file, scratch=tmp_path / "scratch")
    tokenizer = AutoTokenizer.from_pretrained(source.files[0].parent)
    assert tokenizer("ab").input_ids == [0] * first + [5]
    prose = tmp_path / "prose.txt"
    prose.write_text("ab" * 99)
    assert Text(prose).windows(source, 32, 2, 61)[:, :2].tolist() == [[0, 5] if first else [5, 5]] * 2


def test_ambiguous_gguf_folder_and_missing_tokenizer_are_refused(gguf_file, tmp_path):
    import gguf_toys

    model = gguf_toys.model("Qwen3")
    facts = gguf_toys.metadata(model, "qwen3")
    bare = {key: value for key, value in facts.items() if not key.startswith("tokenizer.")}
    tensors = gguf_toys.gguf_tensors(model, "qwen3")
    gguf_toys.write(gguf_file.parent / "zoo.gguf", tensors, bare, "qwen3")
    with pytest.raises(ConversionError, match=r"toy\.gguf, zoo\.gguf"):
        open_source(gguf_file.parent, scratch=tmp_path / "scratch")
    with pytest.raises(ConversionError, match=r"zoo\.gguf.*tokenizer"):
        open_source(gguf_file.parent / "zoo.gguf", scratch=tmp_path / "scratch")
    gguf_toys.write(gguf_file.parent / "zoo.gguf", tensors, facts | {"tokenizer.ggml.model": "rwkv"}, "qwen3")
    with pytest.raises(ConversionError, match=r"zoo\.gguf.*rwkv") as caught:
        open_source(gguf_file.parent / "zoo.gguf", scratch=tmp_path / "scratch")
    assert "\n" not in str(caught.value)


def test_folder_of_gguf_source_is_not_overwritten(gguf_file):
    for name in ("config.json", "model.safetensors"):
        (gguf_file.parent / name).write_text("{}")
    before = gguf_file.read_bytes()
    with pytest.raises(ConversionError, match=str(gguf_file.parent)):
        crosshead.convert(gguf_file, gguf_file.parent, {"knocking": {}}, overwrite=True, verify=False)
    assert gguf_file.read_bytes() == before


def test_too_old_transformers_is_refused_for_gguf(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tokenizer.transformers, "__version__", "5.17.1")
    with pytest.raises(ConversionError, match=r"transformers 5\.17\.1"):
        open_source(gguf_file, scratch=tmp_path)
