"""Conversions of DeepSeek-V2 and DeepSeek-V3, folds into `kv_b_proj`, and refused requests."""

import json
import re
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import crosshead
import toys
from broken import config
from crosshead.common.errors import ConversionError
from crosshead.conversion.architectures.families import read_config, tensor_shapes
from crosshead.conversion.architectures.mixer_tensors import cache_bytes
from tiers import grid
from toy_checkpoints import write_model, write_stock

RANKS = {"full rank": None, "low rank": 10}
NEUTRAL = {
    "knocking": {"on": "query+value"},
    "mixture": {"active_heads": 4, "gate": "binary", "router": "query_norm", "method": "paper"},
    "talking": {},
    "gating": {},
}
CONVERSIONS = [
    pytest.param(backbone, name, marks=() if (backbone, name) == ("DeepseekV3", "knocking") else pytest.mark.slow)
    for backbone, name in product(toys.LATENT, NEUTRAL)
]
LINEAR = {"knocking": {"form": "linear", "on": ["query", "value"]}}


def logits(model):
    with torch.no_grad():
        return model.eval()(toys.tokens()).logits


def load_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def name_published_code(folder, backbone):
    """Name the code of published models in the config, and let it fail if it is run."""
    parts = {"AutoConfig": ("configuration", "Config"), "AutoModelForCausalLM": ("modeling", "ForCausalLM")}
    config(auto_map={key: f"{file}_deepseek.{backbone}{end}" for key, (file, end) in parts.items()})(folder)
    for file, _ in parts.values():
        (folder / f"{file}_deepseek.py").write_text("raise SystemExit")


@pytest.mark.oldest
@pytest.mark.parametrize(("backbone", "name"), CONVERSIONS)
def test_neutral_conversion_and_fold_round_trip(backbone, name, tmp_path):
    source = write_stock(tmp_path / "source", backbone)
    name_published_code(source, backbone)
    report = crosshead.convert(source, tmp_path / "made", {name: NEUTRAL[name]})
    measured = report["verification"]
    assert measured["must_equal"] and measured["greatest_logit_difference"] == 0
    assert measured["kv_bytes_per_token_before"] == measured["kv_bytes_per_token_after"] == 2 * (12 + 4) * 4
    assert torch.equal(logits(load_model(tmp_path / "made")), logits(load_model(source)))
    crosshead.fold(tmp_path / "made", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(".mlp.experts.3.down_proj." in key for key in before)


@pytest.mark.oldest
@pytest.mark.parametrize(("backbone", "rank"), grid(toys.LATENT, RANKS, strength=1))
def test_linear_knocking_folds_into_stock_projections(backbone, rank, tmp_path):
    model = toys.mixed_model(backbone, LINEAR, q_lora_rank=RANKS[rank])
    expected = logits(model)
    write_model(model, tmp_path / "model")
    report = crosshead.fold(tmp_path / "model", tmp_path / "folded")
    folded = load_model(tmp_path / "folded")
    assert type(folded) is toys.STOCK[backbone][1]
    assert (logits(folded) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    actions = {name: tensor["fate"] for name, tensor in report["tensors"].items()}
    query = "q_proj" if RANKS[rank] is None else "q_b_proj"
    rewritten = {f"model.layers.{layer}.self_attn.{part}.weight" for layer in (0, 1) for part in (query, "kv_b_proj")}
    assert {name for name, action in actions.items() if action == "rewritten"} == rewritten
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "folded"))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    keys = [tensors[name].unflatten(0, (4, 8 + 6))[:, :8] for tensors in (before, after)]
    assert torch.equal(*keys)  # only the rows of values change
    assert json.loads((tmp_path / "folded" / "config.json").read_text())["model_type"] == folded.config.model_type


@pytest.mark.parametrize("form", ("mlp", "gate"))
def test_nonlinear_knocking_does_not_fold(form, tmp_path):
    write_model(toys.mixed_model("DeepseekV2", {"knocking": {"form": form}}), tmp_path / "model")
    with pytest.raises(ConversionError, match=f"form={form!r}"):
        crosshead.fold(tmp_path / "model", tmp_path / "folded")


@pytest.mark.slow
@pytest.mark.parametrize("backbone", toys.LATENT)
def test_fitted_router_has_lower_divergence_than_paper_router(backbone, tmp_path):
    source = write_stock(tmp_path / "source", backbone)
    report = crosshead.convert(source, tmp_path / "made", {"mixture": {"active_heads": "75%"}})
    paper = crosshead.convert(source, tmp_path / "paper", {"mixture": {"active_heads": "75%", "method": "paper"}})
    divergences = [each["verification"]["kl_divergence"] for each in (report, paper)]
    assert 0 < divergences[0] < divergences[1]


@pytest.mark.parametrize(
    ("mixers", "options", "message"),
    [
        ({"explicit": {}}, {}, "explicit"),
        ({}, {"cache": "50%"}, "--cache.*deepseek_v3"),
        ({"knocking": {"on": "key"}}, {}, "mixers.knocking.on"),
        ({"differential": {"half_values": True}}, {}, "half_values"),
        ({"differential": {"version": 2}}, {}, "version"),
        ({"mixture": {"active_heads": 3, "shared": "calibrated"}}, {}, "shared"),
    ],
)
def test_unsupported_requests_are_refused(mixers, options, message, tmp_path):
    source = write_stock(tmp_path / "source", "DeepseekV3")
    with pytest.raises(ConversionError, match=message) as caught:
        crosshead.convert(source, tmp_path / "made", mixers, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_gguf_fold_is_refused(tmp_path):
    source = write_stock(tmp_path / "source", "DeepseekV2")
    with pytest.raises(ConversionError, match=re.escape("'deepseek_v2'")):
        crosshead.fold(source, tmp_path / "model.gguf")


def test_quantised_checkpoints_are_refused():
    content = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ConversionError, match="fp8"):
        read_config(content, "stock", "DeepSeek-V3")


def test_expert_biases_keep_dtype_in_bfloat16_conversion(tmp_path):
    """In lower precision, small differences that select experts are lost beside the biases' large common part."""
    source = write_stock(tmp_path / "source", "DeepseekV3")
    file, name = source / "model.safetensors", "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(file)
    tensors[name] = 9 + torch.linspace(-0.01, 0.01, len(tensors[name]))
    save_file(tensors, file, metadata={"format": "pt"})
    crosshead.convert(source, tmp_path / "made", {"gating": {}}, dtype="bfloat16")
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert torch.equal(made[name], tensors[name]) and made["lm_head.weight"].dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    assert torch.equal(model.state_dict()[name], tensors[name])


def test_multi_token_prediction_layers_are_dropped(tmp_path):
    source = write_stock(tmp_path / "source", "DeepseekV3")
    file = source / "model.safetensors"
    ends = ("eh_proj", "enorm", "hnorm", "mlp.gate", "self_attn.o_proj", "shared_head.head")
    further = {f"model.layers.2.{end}.weight": torch.ones(3) for end in ends}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    report = crosshead.convert(source, tmp_path / "made", {"gating": {}})
    assert all("further tokens" in report["dropped"][name] for name in further)
    assert list(report["dropped"]) == sorted(further)  # in the order of the file, in every run


@pytest.mark.parametrize(("backbone", "case"), grid(toys.LATENT, toys.SHARED_ROTARY_CASES, strength=1))
def test_tensor_shapes_and_cache_bytes_match_saved_model(backbone, case, tmp_path):
    model = toys.mixed_model(backbone, toys.SHARED_ROTARY_CASES[case])
    cache = model(toys.tokens(batch=1, length=5)).past_key_values
    cached = sum(tensor.numel() * 4 for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert cache_bytes(model.config, torch.float32) * 5 == cached
    model.save_pretrained(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert tensor_shapes(model.config) == saved
