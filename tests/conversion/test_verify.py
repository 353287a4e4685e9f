"""Verification tells a wrong conversion from a right one, whatever the model's size and dtype."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import crosshead
from crosshead.common.errors import ConversionError
from crosshead.conversion import fold as fold_layers
from crosshead.conversion.compress import convert_layers
from crosshead.conversion.fold import multiply_projections
from crosshead.conversion.sources.tensor_store import Entry
from crosshead.conversion.verification import reload, verify
from crosshead.modeling import bundle
from tiers import grid
from toy_checkpoints import MANY_SHARDS, write_model, write_stock

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LINEAR = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}
EXPLICIT = {"explicit": {}}
CALIBRATED = {"mixture": {"active_heads": "100%", "shared_heads": 1, "shared": "calibrated"}}


@pytest.fixture
def skip_reload(monkeypatch):
    """Skip the reload in a new process, which takes seconds."""
    monkeypatch.setattr(verify, "reload_check", lambda *arguments: ({}, None))
    monkeypatch.setattr(verify, "load_processor", lambda source: None)


def write_trained_model(folder, mixers, dtype, **changes):
    """Write a model whose mechanisms have moved from their initial values."""
    write_stock(folder / "stock", **changes)
    crosshead.convert(folder / "stock", folder / "made", mixers, verify=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "made")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".mixers." in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return write_model(model, folder / "trained", MANY_SHARDS, dtype)


@pytest.mark.oldest
def test_report_counts_every_tensor(tmp_path):
    source = write_stock(tmp_path / "source", "Qwen3Moe", MANY_SHARDS)
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {}})
    measured = report["verification"]
    total = sum(report["counts"][action] for action in ("copied", "rewritten", "created"))
    assert measured["tensors"] == {"expected": total, "missing": 0, "unexpected": 0}
    expected = dict.fromkeys(("missing", "unexpected", "mismatched", "errors", "unloaded"), 0)
    assert measured["reload"]["tensors"] == expected
    assert measured["reload"]["checked"] == "logits and text"
    assert measured["must_equal"]
    assert json.loads((tmp_path / "made" / "conversion.json").read_text())["verification"] == measured


def test_model_larger_than_memory_is_verified_by_names_and_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(reload, "fits_in_memory", lambda size: False)
    source = write_stock(tmp_path / "source", shard_size=MANY_SHARDS)
    monkeypatch.setattr(verify, "final_logits", None)  # it would read the whole model once more
    measured = crosshead.convert(source, tmp_path / "made", {"knocking": {}})["verification"]
    assert measured["greatest_logit_difference"] == 0
    expected = dict.fromkeys(("missing", "unexpected", "mismatched", "errors"), 0)
    report = {"remote_code": True, "checked": "names and shapes", "tensors": expected, "same_processor": True}
    assert measured["reload"] == report


def test_work_grows_linearly_with_number_of_tensors(tmp_path, monkeypatch):
    """Large mixtures of experts have tens of thousands of tensors in hundreds of thousands of chunks."""
    sizes, counted = [], Entry.size
    monkeypatch.setattr(Entry, "size", property(lambda entry: sizes.append(entry) or counted.fget(entry)))
    reads = []
    for experts in (8, 32):
        source = write_stock(tmp_path / f"{experts}", "Qwen3Moe", num_experts=experts)
        sizes.clear()
        report = crosshead.convert(source, tmp_path / f"{experts}-made", {"knocking": {}}, verify=False)
        reads.append(len(sizes) / len(report["tensors"]))
    assert reads[1] < 1.5 * reads[0]


def test_bad_tokenizer_is_refused_before_writing(tmp_path):
    source = write_stock(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    steps = []
    with pytest.raises(ConversionError, match="tokenizer"):
        crosshead.convert(source, tmp_path / "made", {"knocking": {}}, progress=lambda *done: steps.append(done))
    assert steps == []


def patch_starting_values(monkeypatch):
    right = convert_layers.starting_values
    monkeypatch.setattr(
        convert_layers,
        "starting_values",
        lambda *arguments: {name: 1.001 * value for name, value in right(*arguments).items()},
    )


def patch_head_order(monkeypatch):
    right = convert_layers.reorder

    def reorder(tensors, order, layout):
        other = right(tensors, [order[1], order[0], *order[2:]], layout)
        return right(tensors, order, layout) | {"q_proj.weight": other["q_proj.weight"]}

    monkeypatch.setattr(convert_layers, "reorder", reorder)


@pytest.mark.parametrize(("mixers", "fault"), [(LINEAR, patch_starting_values), (CALIBRATED, patch_head_order)])
def test_wrong_neutral_conversion_fails_verification(mixers, fault, skip_reload, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", num_key_value_heads=1)
    fault(monkeypatch)
    with pytest.raises(ConversionError, match="KL"):
        crosshead.convert(source, tmp_path / "made", mixers)
    assert not (tmp_path / "made").exists()


def transposed(tensors, layout, mechanism):
    turned = {name: tensor.T.contiguous() if ".mixers." in f".{name}" else tensor for name, tensor in tensors.items()}
    return multiply_projections(turned, layout, mechanism)


def without_bias(tensors, layout, mechanism):
    right = multiply_projections(tensors, layout, mechanism)
    return right | {name: torch.zeros_like(tensor) for name, tensor in right.items() if name == "v_proj.bias"}


def swapped_heads(tensors, layout, mechanism):
    right = multiply_projections(tensors, layout, mechanism)
    heads = right["v_proj.weight"].unflatten(0, (layout.key_value_heads, -1))
    return right | {"v_proj.weight": heads.flip(0).flatten(0, 1)}


def one_head_forgotten(tensors, layout, mechanism):
    right = multiply_projections(tensors, layout, mechanism)
    rows = slice(0, layout.head_dim)
    right["q_proj.weight"][rows] = tensors["q_proj.weight"][rows]
    return right


@pytest.mark.parametrize(
    ("backbone", "rule", "dtype"),
    grid(["Llama", "Qwen3Moe"], [transposed, without_bias, swapped_heads, one_head_forgotten], DTYPES, strength=1),
)
def test_wrong_fold_fails_verification(backbone, rule, dtype, skip_reload, tmp_path, monkeypatch):
    model = write_trained_model(tmp_path, LINEAR, DTYPES[dtype], backbone=backbone, attention_bias=True)
    right = crosshead.fold(model, tmp_path / "right")["verification"]
    assert right["must_equal"]
    monkeypatch.setattr(fold_layers, "multiply_projections", rule)
    with pytest.raises(ConversionError, match="KL"):
        crosshead.fold(model, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(("backbone", "dtype"), grid(["Llama", "Qwen3Moe"], ["float16", "bfloat16"], strength=1))
def test_half_precision_rounding_passes_verification(backbone, dtype, skip_reload, tmp_path):
    source = write_stock(tmp_path / "source", backbone, max_position_embeddings=256)
    measured = crosshead.convert(source, tmp_path / "made", EXPLICIT, dtype=dtype)["verification"]
    assert measured["must_equal"]
    share = measured["greatest_logit_difference"] / measured["largest_logit"]
    assert share > 0.1 if backbone == "Qwen3Moe" else 0 < share < 0.1  # rounding sends a token to another expert


def test_tolerance_is_strict_if_dtype_is_unchanged(skip_reload, tmp_path):
    source = write_stock(tmp_path / "source", dtype=torch.bfloat16)
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {}}, dtype="bfloat16", verify=False)
    assert report["tolerance"] == {"logits": 1e-5, "divergence": 1e-5}
    report = crosshead.fold(tmp_path / "made", tmp_path / "back")
    assert report["tolerance"] == {"logits": 1e-4, "divergence": 1e-5}
    assert report["verification"]["greatest_logit_difference"] == 0


def test_wrong_bundled_code_fails_verification(tmp_path, monkeypatch):
    code_files = bundle.code_files

    def changed(config):
        right = code_files(config)
        wrong = {name: text.replace("return self.down(2 *", "return self.down(2.01 *") for name, text in right.items()}
        assert wrong != right
        return wrong

    monkeypatch.setattr(bundle, "code_files", changed)
    with pytest.raises(ConversionError, match="outputs"):
        crosshead.convert(write_stock(tmp_path / "source"), tmp_path / "made", {"knocking": {}})
    assert not (tmp_path / "made").exists()


def test_home_folder_paths_are_expanded(skip_reload, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_stock(tmp_path / "source")
    crosshead.convert("~/source", "~/made", {"knocking": {}}, verify=False)
    measured = crosshead.verify("~/source", "~/made")["verification"]
    assert measured["must_equal"] and measured["tensors"]["changed_since_conversion"] == 0
    changed = json.loads((tmp_path / "made" / "config.json").read_text()) | {"rms_norm_eps": 0.1}
    (tmp_path / "made" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConversionError, match="KL"):
        crosshead.verify("~/source", "~/made")


def test_trained_model_need_not_equal_source(skip_reload, tmp_path):
    model = write_trained_model(tmp_path, LINEAR, torch.float32)
    (model / "conversion.json").write_bytes((tmp_path / "made" / "conversion.json").read_bytes())
    measured = crosshead.verify(tmp_path / "stock", model)["verification"]
    assert not measured["must_equal"]
    made = json.loads((model / "conversion.json").read_text())["tensors"]
    assert measured["tensors"]["changed_since_conversion"] == sum(".mixers." in name for name in made)
    assert measured["kl_divergence"] > 1e-3
    assert json.loads((model / "conversion.json").read_text())["verification"] == measured


@pytest.mark.parametrize("content", ["", "{}", '{"tensors": {}}', "[]"])
def test_damaged_conversion_record_is_refused(skip_reload, tmp_path, content):
    source = write_stock(tmp_path / "source")
    crosshead.convert(source, tmp_path / "made", LINEAR, verify=False)
    record = tmp_path / "made" / "conversion.json"
    record.write_text(content)
    with pytest.raises(ConversionError, match=r"made/conversion\.json"):
        crosshead.verify(source, tmp_path / "made")
    assert record.read_text() == content
    record.unlink()
    assert "changed_since_conversion" not in crosshead.verify(source, tmp_path / "made")["verification"]["tensors"]


def test_progress_reports_checked_bytes(skip_reload, tmp_path):
    source = write_stock(tmp_path / "source", shard_size=MANY_SHARDS)
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {}}, verify=False)
    steps = []
    crosshead.verify(source, tmp_path / "made", progress=lambda *done: steps.append(done))
    checked = [done for stage, *done in steps if stage == "checking"]
    assert checked == sorted(checked)
    assert checked[-1][0] == checked[-1][1] > 0
    assert len(checked) == report["counts"]["copied"] + len(report["tensors"])
