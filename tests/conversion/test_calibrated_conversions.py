"""Conversions with calibration: component heads, the choice of their numbers, and the order of heads."""

import errno
import json
import shutil
from hashlib import sha256
from platform import python_version

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion import stages
from crosshead.conversion.architectures.families import read_config, tensor_shapes
from crosshead.conversion.calibration.calibration import Observers, fingerprint_of, observe
from crosshead.conversion.calibration.text import DEFAULT_NAME, HELD_OUT, Text, default_documentation, default_text
from crosshead.conversion.compress import auto_layers
from crosshead.conversion.convert import resolve
from crosshead.conversion.options import Options
from crosshead.conversion.sources.resolve import open_source
from crosshead.conversion.sources.safetensors_store import WEIGHTS, SafetensorsStore
from crosshead.conversion.writing.shard_writer import write_shard
from crosshead_command.screen import calibration_lines
from tiers import first, grid
from toy_checkpoints import MANY_SHARDS, write_model, write_stock

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}


@pytest.fixture(scope="module", params=first(toys.BACKBONES))
def source(request, tmp_path_factory):
    return write_stock(tmp_path_factory.mktemp(request.param) / "source", request.param, **HEADS)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(default_text()[:2520], encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("source", "counts"),
    grid(toys.BACKBONES, [(3, 3, 1), ([2, 4], [4, 1], 1), (2, [2, 4], 2)], strength=1),
    indirect=["source"],
    ids=str,
)
def test_component_heads_shrink_cache_and_fold_back(source, counts, text, tmp_path):
    mixers = {"explicit": dict(zip(("key_heads", "value_heads", "groups"), counts, strict=True)), "gating": {}}
    report = crosshead.convert(source, tmp_path / "made", mixers, calibration=text)
    measured = report["verification"]
    assert measured["kv_bytes_per_token_after"] < measured["kv_bytes_per_token_before"]
    assert measured["reload"]["greatest_logit_difference"] < 1e-4
    assert 0 < measured["kl_divergence"] < 2
    assert report["calibration"]["text"] == "prose.txt"
    folded = crosshead.fold(tmp_path / "made", tmp_path / "back")["verification"]
    assert folded["greatest_logit_difference"] < 1e-4 * folded["largest_logit"]


def test_aligned_method_has_lower_divergence_than_svd(source, text, tmp_path):
    losses = {}
    for method in ("aligned", "svd"):
        mixers = {"explicit": {"key_heads": 2, "value_heads": 2, "method": method}}
        extra = {"calibration": text} if method == "aligned" else {}
        losses[method] = crosshead.convert(source, tmp_path / method, mixers, **extra)["verification"]["kl_divergence"]
    assert losses["aligned"] < 0.5 * losses["svd"]


@pytest.mark.parametrize(
    "mixers",
    [
        {"explicit": {"key_heads": 2, "value_heads": 3}, "mixture": {"active_heads": 6, "shared": "calibrated"}},
        {"explicit": {"key_heads": 2, "value_heads": 2, "groups": 2}},
        {"explicit": {"key_heads": 2, "value_heads": 2, "groups": 2}, "mixture": {"active_heads": 6}},
    ],
    ids=["reordered", "groups", "groups in order"],
)
def test_saved_calibration_gives_the_same_bytes(source, mixers, text, tmp_path):
    saved = tmp_path / "saved.safetensors"
    crosshead.convert(source, tmp_path / "first", mixers, calibration=text, save_calibration=saved, verify=False)
    report = crosshead.convert(source, tmp_path / "second", mixers, calibration=saved, verify=False)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    assert report["calibration"]["saved"] == "saved.safetensors"
    other = write_stock(tmp_path / "other", "Llama")
    for wrong in ({"explicit": {"key_heads": 1}}, {"mixture": {"active_heads": 3, "shared": "calibrated"}}):
        with pytest.raises(ConversionError, match=r"--calibration .*saved\.safetensors"):
            crosshead.convert(other, tmp_path / "third", wrong, calibration=saved)


TENSORS_RUN = ["embed_tokens", "0.input_layernorm", "0.self_attn.q_proj", "1.self_attn.v_proj", "0.mlp.down_proj"]


def test_saved_calibration_for_other_weights_is_refused(text, tmp_path):
    source, saved = write_stock(tmp_path / "source"), tmp_path / "saved.safetensors"
    mixers = {"explicit": {"key_heads": 1}}
    options = {"calibration": saved, "verify": False, "overwrite": True}
    crosshead.convert(source, tmp_path / "first", mixers, calibration=text, save_calibration=saved, verify=False)
    whole = load_file(source / WEIGHTS)
    for part in TENSORS_RUN:
        state = {name: tensor * 1.001 if part in name else tensor for name, tensor in whole.items()}
        save_file(state, source / WEIGHTS, {"format": "pt"})
        with pytest.raises(ConversionError, match="fingerprint"):
            crosshead.convert(source, tmp_path / "made", mixers, **options)
    save_file(whole | {"lm_head.weight": -whole["lm_head.weight"]}, source / WEIGHTS, {"format": "pt"})
    crosshead.convert(source, tmp_path / "made", mixers, **options)  # calibration does not run the LM head
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    with pytest.raises(ConversionError, match="fingerprint"):
        crosshead.convert(source, tmp_path / "made", mixers, **options)


def test_saved_calibration_of_earlier_version_is_refused(text, tmp_path):
    """The fingerprint of earlier versions covered key and value weights alone."""
    source, saved = write_stock(tmp_path / "source"), tmp_path / "saved.safetensors"
    mixers = {"explicit": {"key_heads": 1}}
    crosshead.convert(source, tmp_path / "first", mixers, calibration=text, save_calibration=saved, verify=False)
    save_file(load_file(saved), saved, {"key_value_weights": "0" * 64})
    with pytest.raises(ConversionError, match=r"saved\.safetensors"):
        crosshead.convert(source, tmp_path / "made", mixers, calibration=saved)


def test_calibration_reads_tensors_once_and_fingerprints_all_of_them(text, tmp_path, monkeypatch):
    source = open_source(write_stock(tmp_path / "source", "Qwen3Moe"), scratch=tmp_path)
    stock = read_config(source.config, "stock", "source")
    layouts = toys.mixed_config("Qwen3Moe", {}).layouts()
    reads = []

    def read(self, name):
        reads.append(name)
        return original(self, name)

    original = SafetensorsStore.read
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsStore, "read", read)
        observers = Observers({"use"}, layouts, [3, 3], False)
        made = observe(source, stock, Text.of(text, source), observers, tmp_path / "seen", lambda *done: None)
    assert len(reads) == len(set(reads)) == len(tensor_shapes(stock)) - 2
    progress = []
    with safe_open(made.path, framework="pt") as file:
        fingerprint = fingerprint_of(source.store, stock, lambda *done: progress.append(done))
        assert file.metadata()["fingerprint"] == fingerprint
    assert progress[-1][1] == progress[-1][2] == sum(source.store.entries[name].size for name in reads)


@pytest.mark.parametrize("backbone", first(toys.BACKBONES, 0))
def test_saved_calibration_can_be_used_for_other_head_counts(backbone, text, tmp_path):
    """Solutions that were fitted for some counts of heads are used for these counts only."""
    source = write_stock(tmp_path / "source", backbone, **HEADS | {"max_position_embeddings": 512})
    saved = tmp_path / "saved.safetensors"
    mixers = [{"explicit": {"key_heads": 2, "value_heads": count, "groups": 1}} for count in (2, 3)]
    crosshead.convert(source, tmp_path / "made", mixers[0], calibration=text, save_calibration=saved, verify=False)
    stored = load_file(saved)
    assert {name.split(".")[2] for name in stored if ".statistics." in name} == {"key", "value", "output", "fitted"}
    made = [
        crosshead.convert(source, tmp_path / name, mixers[1], calibration=origin)["verification"]["kl_divergence"]
        for name, origin in (("other", saved), ("anew", text))
    ]
    assert 0 < made[1] < made[0] < 1.5 * made[1]
    save_file(stored | {"0.statistics.output.2x2": torch.zeros(3, 3)}, saved)
    with pytest.raises(ConversionError, match=r"0.statistics.output.2x2.*\(3, 3\)"):
        crosshead.convert(source, tmp_path / "third", mixers[0], calibration=saved)


def test_full_disk_while_saving_calibration_keeps_work_folder(text, tmp_path, monkeypatch):
    source, mixers = write_stock(tmp_path / "source"), {"explicit": {"key_heads": 1}}
    (tmp_path / "full").mkdir()

    def full(path, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    saved = tmp_path / "full" / "saved.safetensors"
    with pytest.raises(ConversionError, match=rf"--save-calibration {saved}.*No space left"):
        crosshead.convert(source, tmp_path / "made", mixers, calibration=text, save_calibration=saved, verify=False)
    assert list((tmp_path / "full").iterdir()) == []
    assert [path.name for path in (tmp_path / ".made.crosshead-partial").glob("*.safetensors")]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("present", ["source/model.safetensors", "saved.safetensors"])
def test_save_calibration_never_overwrites_other_files(present, text, tmp_path):
    source, mixers = write_stock(tmp_path / "source"), {"explicit": {"key_heads": 1}}
    options = {"calibration": text, "verify": False}
    other = write_stock(tmp_path / "other", **HEADS)
    crosshead.convert(other, tmp_path / "third", mixers, save_calibration=tmp_path / "saved.safetensors", **options)
    saved = tmp_path / present
    before = saved.read_bytes()
    with pytest.raises(ConversionError, match=f"--save-calibration {saved}"):
        crosshead.convert(source, tmp_path / "made", mixers, save_calibration=saved, **options)
    assert saved.read_bytes() == before
    saved = tmp_path / "new.safetensors"
    for out in ("made", "again"):  # the second run finds the same calibration there
        crosshead.convert(source, tmp_path / out, mixers, save_calibration=saved, **options)


def test_auto_layers_stay_within_cache_budget(source, text, tmp_path):
    report = crosshead.convert(
        source, tmp_path / "made", {"explicit": {}}, layers="auto", budget=0.7, calibration=text
    )
    measured = report["verification"]
    assert measured["kv_bytes_per_token_after"] <= 0.7 * measured["kv_bytes_per_token_before"]
    mixers = json.loads((tmp_path / "made" / "config.json").read_text())["mixers"]["explicit"]
    assert mixers["key_heads"] == report["chosen"]["key_heads"]
    assert mixers["value_heads"] == report["chosen"]["value_heads"]
    pairs = zip(mixers["key_heads"], mixers["value_heads"], strict=True)
    heads = json.loads((source / "config.json").read_text())["num_key_value_heads"]
    assert mixers["layers"] == [layer for layer, pair in enumerate(pairs) if min(pair) < heads]
    assert set(report["chosen"]["losses"]) == {"0", "1"}


@pytest.mark.parametrize("method", first(["svd", "aligned"]))
def test_auto_layers_use_and_record_given_or_default_text(method, text, tmp_path):
    source, mixers = write_stock(tmp_path / "source"), {"explicit": {"method": method}}
    options = {"layers": "auto", "budget": 0.6, "verify": False}
    made = crosshead.convert(source, tmp_path / "made", mixers, calibration=text, **options)
    assert made["chosen"]["text"] == made["calibration"]["text"] == "prose.txt"
    default = crosshead.convert(source, tmp_path / "default", mixers, **options)
    assert default["chosen"]["text"] == DEFAULT_NAME
    content = default_text()[: int(len(default_text()) * HELD_OUT)] + default_documentation()
    assert default["chosen"]["sha256"] == (digest := sha256(content.encode()).hexdigest())
    assert default["calibration"]["sha256"] == digest
    assert made["chosen"]["sha256"] == sha256(text.read_bytes()).hexdigest()
    assert made["versions"]["python"] == python_version()
    assert default["chosen"]["losses"] != made["chosen"]["losses"]
    assert any(DEFAULT_NAME in line for line in calibration_lines(default))
    saved = tmp_path / "saved.safetensors"
    saving = {"calibration": text, "save_calibration": saved, "verify": False}
    crosshead.convert(source, tmp_path / "kept", {"explicit": {"key_heads": 1}}, **saving)
    if method == "svd":
        with pytest.raises(ConversionError, match=r"--calibration .*saved\.safetensors"):
            crosshead.convert(source, tmp_path / "third", mixers, calibration=saved, **options)
    else:
        third = crosshead.convert(source, tmp_path / "third", mixers, calibration=saved, **options)
        assert third["chosen"]["text"] == DEFAULT_NAME


def test_resumed_conversion_does_not_choose_layers_again(text, tmp_path, monkeypatch):
    """The finished shards contain the chosen heads."""
    source = write_stock(tmp_path / "source", shard_size=MANY_SHARDS)
    options = {"layers": "auto", "budget": 0.6, "calibration": text, "verify": False}
    crosshead.convert(source, tmp_path / "whole", {"explicit": {}}, **options)

    def killed(path, items):
        if path.name.startswith("model-00003"):
            raise KeyboardInterrupt
        return write_shard(path, items)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, "write_shard", killed)
        crosshead.convert(source, tmp_path / "made", {"explicit": {}}, **options)
    monkeypatch.setattr(auto_layers, "measure_losses", None)
    crosshead.convert(source, tmp_path / "made", {"explicit": {}}, **options)
    files = [sorted(folder.glob("*.safetensors")) for folder in (tmp_path / "whole", tmp_path / "made")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_resume_fingerprint_covers_settings_that_change_rounding(tmp_path, monkeypatch):
    source = open_source(write_stock(tmp_path / "source"), scratch=tmp_path)
    copied, computed = (resolve(source, {mixer: {}}, Options()) for mixer in ("knocking", "explicit"))
    before = copied.fingerprint, computed.fingerprint
    assert (copied.fingerprint, computed.fingerprint) == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert copied.fingerprint == before[0] and computed.fingerprint != before[1]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    assert copied.fingerprint != before[0]


@pytest.mark.parametrize("backbone", first(["Qwen3", "Llama"]))
def test_weights_do_not_depend_on_source_shards_or_dtype(backbone, text, tmp_path):
    options = {"tie_word_embeddings": True, **HEADS}
    stored = write_stock(tmp_path / "stored", backbone, MANY_SHARDS, torch.bfloat16, **options)
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    wide = write_model(model, tmp_path / "wide")
    made = {}
    for source in (stored, wide):
        mixers = {"explicit": {"key_heads": 2, "value_heads": 3}}
        crosshead.convert(source, tmp_path / "made", mixers, calibration=text, verify=False, overwrite=True)
        files = (tmp_path / "made").glob("*.safetensors")
        made[source] = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert made[stored].keys() == made[wide].keys()
    for name, tensor in made[stored].items():
        assert tensor.equal(made[wide][name].bfloat16()), name


@pytest.mark.oldest
def test_calibrated_shared_heads_reorder_only_attention_tensors(source, text, tmp_path):
    mixers = {"mixture": {"active_heads": 8, "shared_heads": 3, "shared": "calibrated"}}
    report = crosshead.convert(source, tmp_path / "made", mixers, calibration=text)
    assert report["tolerance"]["divergence"] == 1e-5  # all heads are active, so that their order does not matter
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "made"))
    moved = [name for name in before if not before[name].equal(after[name])]
    assert moved
    assert all("self_attn" in name for name in moved)
