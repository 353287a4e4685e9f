"""The tensor tables equal the tensors that save_pretrained writes, for stock and Crosshead models."""

import pytest
import torch
from safetensors.torch import load_file

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.architectures.families import FAMILIES, read_config, tensor_shapes
from crosshead.conversion.architectures.mixer_tensors import cache_bytes, starting_values
from crosshead.conversion.verification.tolerances import starts_neutral
from tiers import grid

PLAIN = pytest.param({}, marks=pytest.mark.oldest)
VARIANTS = [PLAIN, {"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True}]
DRAWS = 20
"""Number of random initialisations to pool: tensors of eight numbers are too small to compare single draws."""


def saved_shapes(model, folder):
    model.save_pretrained(folder)
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "+".join(variant) or "plain")
@pytest.mark.parametrize("backbone", [*toys.BACKBONES, "T5"])
def test_stock_tensor_shapes_match_saved_checkpoint(backbone, variant, tmp_path):
    model = toys.stock_model(backbone, **variant)
    assert tensor_shapes(model.config) == saved_shapes(model, tmp_path)


def test_tensor_shapes_of_dense_moe_layers_match_saved_checkpoint(tmp_path):
    model = toys.stock_model("Qwen3Moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert tensor_shapes(model.config) == saved_shapes(model, tmp_path)


@pytest.mark.parametrize(("backbone", "case"), grid(toys.BACKBONES, toys.CASES, strength=1))
def test_mixed_tensor_shapes_match_saved_checkpoint(backbone, case, tmp_path):
    model = toys.mixed_model(backbone, toys.CASES[case])
    assert tensor_shapes(model.config) == saved_shapes(model, tmp_path)


@pytest.mark.parametrize("case", toys.CASES)
def test_starting_values_match_model_initialisation(case):
    config = toys.mixed_config("Llama", toys.CASES[case])
    torch.manual_seed(0)
    states = [toys.crosshead.CrossheadLlamaForCausalLM(config).state_dict() for _ in range(DRAWS)]
    made = [starting_values(config, 1, seed) for seed in range(DRAWS)]
    again = starting_values(config, 1, seed=0)
    prefix = "model.layers.1.self_attn."
    stored = {name for name in tensor_shapes(config) if name.startswith(f"{prefix}mixers.")}
    assert again.keys() == {name.removeprefix(prefix) for name in stored}
    for name, tensor in again.items():
        assert torch.equal(tensor, made[0][name])
        if torch.equal(tensor, made[1][name]):  # not random, so it must equal the model's initial value
            assert torch.equal(tensor, states[0][prefix + name])
        else:
            drawn = torch.stack([values[name] for values in made]).std()
            expected = torch.stack([values[prefix + name] for values in states]).std()
            assert 2 / 3 < drawn / expected < 3 / 2


def test_starting_values_do_not_change_global_rng_state():
    config = toys.mixed_config("Llama", {"differential": {}})
    before = torch.random.get_rng_state()
    starting_values(config, 0, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", toys.OF_DECODERS)
def test_starts_neutral_agrees_with_neutral_mixer_cases(name):
    for options in toys.NEUTRAL[name]:
        assert starts_neutral(toys.mixed_config("Llama", options), allow_inexact=False)
    case = {name: toys.MECHANISM_CASES[name][name]}
    if name not in ("knocking", "gating"):  # their cases are neutral, too
        assert not starts_neutral(toys.mixed_config("Llama", case), allow_inexact=True)


@pytest.mark.parametrize(
    "mixers",
    [
        {"differential": {}},
        {"explicit": {}},
        {"knocking": {"init": "random"}},
        {"talking": {"dynamic": ["key_logits"]}},
        {"mixture": {"active_heads": 3, "gate_scale": "paper"}},
    ],
    ids=str,
)
def test_non_neutral_mixers_need_allow_inexact(mixers):
    config = toys.mixed_config("Llama", mixers)
    with pytest.raises(ConversionError, match="--allow-inexact"):
        starts_neutral(config, allow_inexact=False)
    assert starts_neutral(config, allow_inexact=True) is False


@pytest.mark.parametrize(("backbone", "case"), grid(["Llama", "Qwen3"], toys.CASES, strength=1))
def test_cache_bytes_match_real_cache(backbone, case):
    model = toys.mixed_model(backbone, toys.CASES[case])
    cache = model(toys.tokens(batch=1, length=5)).past_key_values
    held = sum(tensor.numel() * 4 for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert cache_bytes(model.config, torch.float32) * 5 == held


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ({"model_type": "mistral"}, "stock", "model_type='mistral'"),
        ({}, "stock", "model_type=None"),
        ({"model_type": ["llama"]}, "stock", "model_type="),
        ({"model_type": "crosshead_llama"}, "stock", "crosshead fold"),
        ({"model_type": "llama"}, "crosshead", "crosshead convert"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "stock", "gptq"),
        ({"model_type": "llama", "quantization_config": "int8"}, "stock", "int8"),
        ({"model_type": "llama", "hidden_size": "wide"}, "stock", "hidden_size"),
        ({"model_type": "llama", "hidden_size": 24, "num_attention_heads": 5}, "stock", "config.json"),
    ],
)
def test_unsupported_configs_are_refused(content, kind, message):
    with pytest.raises(ConversionError, match=message) as caught:
        read_config(content, kind, "toy")
    assert "\n" not in str(caught.value)


def test_every_family_has_stock_and_crosshead_configs():
    for name, family in FAMILIES.items():
        assert family.stock.model_type == name
        assert family.crosshead.model_type == f"crosshead_{name}"
