"""`fold --keep-cache`: stock classes compute the model's logits, with the cache of its component heads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import crosshead
import toys
from crosshead.common.errors import ConversionError
from toy_checkpoints import MANY_SHARDS, write_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
ALL_ON = {"mixture": {"active_heads": 8, "router": "query_norm", "gate": "binary"}}
LINEAR = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}


def explicit(keys, values, **options):
    return {"explicit": {"norm": False, "key_heads": keys, "value_heads": values, **options}}


WIDE = {
    "two components": (explicit(2, 2), 1, 2),
    "fewer keys": (explicit(2, 3), 1, 3),
    "fewer values": (explicit(3, 1), 1, 3),
    "linear knocking": (LINEAR | explicit(2, 2), 1, 2),
    "all mechanisms": (LINEAR | explicit(2, 2) | ALL_ON, 1, 2),
    "one component": (explicit(1, 1), 1, 1),
    "groups of one": (explicit(2, 2, groups=2), 2, 1),
    "groups and linear knocking": (LINEAR | explicit(2, 2, groups=2), 2, 1),
    "two groups of two": (explicit(4, 4, groups=2), 2, 2),
    "two groups, fewer values": (explicit(6, 4, groups=2), 2, 3),
}
"""Name -> mechanisms, number of KV heads of the folded model, and number of components per KV head."""
MORE_HEADS = {name: {"num_key_value_heads": 8} for name in WIDE if name.startswith("two groups")}
ROPE = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}


def write_checkpoint(folder, backbone, mixers, dtype=torch.float32, **changes):
    model = toys.mixed_model(backbone, mixers, **HEADS | changes)
    for name, parameter in model.named_parameters():
        if name.endswith("explicit.key.weight"):  # the eps of Qwen3's norm on keys shows for very small scalars
            parameter.data += parameter.data.sign()
    return write_model(model, folder, MANY_SHARDS, dtype)


def run_with_cache(folder):
    """Return the model, logits of a text, logits of its last token with a cache, and cached numbers per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens, cache = toys.tokens(length=40), DynamicCache()
    whole = model(tokens).logits
    model(tokens[:, :-1], past_key_values=cache)
    last = model(tokens[:, -1:], past_key_values=cache).logits
    cached = sum(x[0, :, 0].numel() for layer in cache.layers for x in (layer.keys, layer.values))
    return model, whole, last, cached


def check_fold(source, out, groups, width, largest=1e-5):
    report = crosshead.fold(source, out, keep_cache=True)
    _, expected, expected_last, _ = run_with_cache(source)
    model, whole, last, cached = run_with_cache(out)
    assert type(model).__module__.startswith("transformers.models.")
    assert (model.config.num_key_value_heads, model.config.head_dim) == (groups, 8 * width)
    assert (whole - expected).abs().max() <= largest * expected.abs().max()
    assert (last - expected_last).abs().max() <= largest * expected.abs().max()
    assert cached == 2 * 2 * groups * width * 8
    assert not list(out.glob("*.py")) and "auto_map" not in json.loads((out / "config.json").read_text())
    return report, model


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_folded_stock_model_keeps_logits_and_cache_size(backbone, name, tmp_path):
    mixers, groups, width = WIDE[name]
    heads = HEADS | MORE_HEADS.get(name, {})
    source = write_checkpoint(tmp_path / "model", backbone, mixers, **heads)
    if width > 1 and backbone.startswith("Qwen3"):
        with pytest.raises(ConversionError, match="groups="):
            crosshead.fold(source, tmp_path / "out", keep_cache=True)
        return
    report, model = check_fold(source, tmp_path / "out", groups, width)
    record = report["kept_cache"]
    assert model.config.architectures == [type(model).__name__]  # engines choose their class by it
    assert record["model_type"] == model.config.model_type == ("llama" if width > 1 else backbone_type(backbone))
    assert record["kv_bytes_per_token"] == report["verification"]["kv_bytes_per_token_after"]
    share = groups * width / heads["num_key_value_heads"]
    assert record["kv_bytes_per_token"] == record["kv_bytes_per_token_without_keep_cache"] * share
    assert record["growth_of_q_proj_o_proj_and_attention"] == width
    assert report["options"] == {"keep_cache": True}


def backbone_type(backbone):
    return toys.STOCK[backbone][0].model_type


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("backbone", ["Llama", "Qwen2"])
def test_rope_scaling_becomes_longrope_with_same_logits(backbone, rope, tmp_path):
    source = write_checkpoint(tmp_path / "model", backbone, explicit(2, 2), rope_parameters=ROPE[rope])
    _, model = check_fold(source, tmp_path / "out", 1, 2)
    assert model.config.rope_parameters["rope_type"] == "longrope"


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"tie_word_embeddings": True}], ids=str)
def test_biases_and_tied_embeddings_keep_logits(changes, tmp_path):
    check_fold(write_checkpoint(tmp_path / "model", "Llama", explicit(2, 2), **changes), tmp_path / "out", 1, 2)


@pytest.mark.parametrize("backbone", ["Qwen3", "Qwen3Moe"])
def test_biases_with_key_norm_keep_logits(backbone, tmp_path):
    source = write_checkpoint(tmp_path / "model", backbone, explicit(1, 1), attention_bias=True)
    check_fold(source, tmp_path / "out", 1, 1)


@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_bfloat16_keeps_logits_within_rounding(backbone, tmp_path):
    mixers, groups, width = WIDE["one component" if backbone.startswith("Qwen3") else "two components"]
    model = toys.mixed_model(backbone, mixers, **HEADS)
    for name, parameter in model.named_parameters():  # flatter attention, as in trained models
        parameter.data *= 0.5 if "q_proj" in name or "k_proj" in name else 1
    source = write_model(model, tmp_path / "model", MANY_SHARDS, torch.bfloat16)
    report, _ = check_fold(source, tmp_path / "out", groups, width, largest=2e-2)
    assert report["kept_cache"]["kv_bytes_per_token"] == 2 * 2 * groups * width * 8 * 2


def test_folded_model_converts_again(tmp_path):
    source = write_checkpoint(tmp_path / "model", "Llama", explicit(2, 2))
    crosshead.fold(source, tmp_path / "out", keep_cache=True, verify=False)
    report = crosshead.convert(tmp_path / "out", tmp_path / "again", {"knocking": {"form": "linear"}})
    assert report["verification"]["greatest_logit_difference"] == 0


def test_dry_run_reports_cache_size(tmp_path):
    source = write_checkpoint(tmp_path / "model", "Llama", explicit(2, 2))
    report = crosshead.fold(source, tmp_path / "out", keep_cache=True, plan_only=True)
    assert report["kv_bytes_per_token_after"] == report["kept_cache"]["kv_bytes_per_token"]
    assert not (tmp_path / "out").exists()


SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
REFUSED = {
    "no explicit": ("Llama", LINEAR, {}, "layer 0 has no 'explicit'"),
    "explicit in one layer": ("Llama", explicit(2, 2, layers=[0]), {}, "layer 1 has no 'explicit'"),
    "all components": ("Llama", explicit(4, 4), {}, "without --keep-cache"),
    "values only": ("Llama", {"explicit": {"on": ["value"], "value_heads": 2, "norm": False}}, {}, "keys have 4"),
    "layers differ": ("Llama", explicit([1, 2], 2), {}, "differ in component heads"),
    "norm on outputs": ("Llama", {"explicit": {"key_heads": 2, "value_heads": 2}}, {}, "norm=true"),
    "mlp knocking": ("Llama", {"knocking": {}} | explicit(2, 2), {}, "form='mlp'"),
    "gates": ("Llama", explicit(2, 2) | {"gating": {}}, {}, "'gating'"),
    "some heads active": ("Llama", explicit(2, 2) | {"mixture": {"active_heads": 4}}, {}, "active_heads=4"),
    "talking": ("Llama", explicit(2, 2) | {"talking": {}}, {}, "'talking'"),
    "differential": ("Llama", explicit(2, 2) | {"differential": {}}, {}, "'differential'"),
    "keys with a norm": ("Qwen3", explicit(2, 2), {}, "groups=2"),
    "keys with a norm, experts": ("Qwen3Moe", explicit(2, 1), {}, "groups=2"),
    "sliding window": ("Qwen2", explicit(2, 2), SLIDING, "sliding window"),
    "dynamic RoPE": ("Llama", explicit(2, 2), DYNAMIC, "rope_type='dynamic'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused(name, tmp_path):
    backbone, mixers, changes, reason = REFUSED[name]
    source = write_checkpoint(tmp_path / "model", backbone, mixers, **changes)
    with pytest.raises(ConversionError) as caught:
        crosshead.fold(source, tmp_path / "out", keep_cache=True)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_stock_model_is_refused(tmp_path):
    source = write_model(toys.stock_model("Llama"), tmp_path / "model")
    with pytest.raises(ConversionError, match="crosshead convert"):
        crosshead.fold(source, tmp_path / "out", keep_cache=True)
