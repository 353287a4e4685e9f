"""`model_cost` of a config, against models that are built, run and counted."""

from dataclasses import asdict

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

import crosshead
import toys
from crosshead.conversion.architectures.mixer_tensors import cache_bytes
from crosshead.evals.cost.counting import FLOPS, on_meta
from crosshead.evals.cost.model import model_cost
from crosshead.evals.cost.report import cost_report
from tiers import grid

LENGTH = 9
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def with_twice_the_components(mixers):
    """Double the component heads: with one component there is no matmul for PyTorch's FLOP counter to see."""

    def twice(option, value):
        if not option.endswith(("key_heads", "value_heads")):
            return value
        return [2 * count for count in value] if isinstance(value, list) else 2 * value

    return {name: {option: twice(option, value) for option, value in mixers[name].items()} for name in mixers}


CASES = {"stock": {}} | {case: with_twice_the_components(mixers) for case, mixers in toys.CASES.items()}
on_every_backbone = pytest.mark.parametrize(("backbone", "case"), grid(toys.BACKBONES, CASES, strength=1))


def built_model(backbone, case, **changes):
    """Return a toy model whose experts run one by one: the FLOP counter does not know the grouped matmul."""
    sizes, mixers = HEADS | changes, CASES[case]
    model = toys.mixed_model(backbone, mixers, **sizes) if mixers else toys.stock_model(backbone, **sizes)
    if backbone == "Qwen3Moe":
        model.set_experts_implementation("eager")
    return model


def counted_flops(run):
    """Return the FLOPs of a call by PyTorch's counter, less the rotary angles, which it counts as a matmul."""
    with FlopCounterMode(display=False) as counter:
        run()
    angles = [count for name, count in counter.get_flop_counts().items() if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(sum(count.values()) for count in angles)


@on_every_backbone
def test_parameter_counts_match_built_model(backbone, case):
    model = built_model(backbone, case, attention_bias=True) if backbone != "Qwen2" else built_model(backbone, case)
    cost = model_cost(model.config, LENGTH)
    held = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert cost.parameters == sum(held.values())
    assert cost.attention_parameters == sum(count for name, count in held.items() if ".self_attn." in name)
    assert cost.new_parameters == sum(count for name, count in held.items() if ".mixers." in name)
    idle = sum(count for name, count in held.items() if ".experts." in name) // 2  # two of four experts are selected
    assert cost.active_parameters == cost.parameters - idle
    assert bool(idle) == (backbone == "Qwen3Moe")


@on_every_backbone
def test_flops_match_pytorch_counter(backbone, case):
    model, ids = built_model(backbone, case), toys.tokens(batch=1, length=LENGTH)
    cost = model_cost(model.config, LENGTH)
    training = counted_flops(lambda: model(ids, labels=ids, use_cache=False).loss.backward())
    assert training == cost.training_flops * LENGTH
    with torch.no_grad():
        prefill = counted_flops(lambda: model(ids, logits_to_keep=1))
        past = model(ids[:, :-1], past_key_values=DynamicCache(config=model.config)).past_key_values
        decode = counted_flops(lambda: model(ids[:, -1:], past_key_values=past))
    assert prefill == cost.input_flops
    assert round(prefill / FLOPS / LENGTH) == cost.prefill_multiplications
    assert decode == cost.decode_flops


@pytest.mark.parametrize(("backbone", "case"), grid(["Qwen2", "Qwen3", "Qwen3Moe"], CASES, strength=1))
@torch.no_grad()
def test_sliding_window_limits_kv_bytes_and_decode_flops(backbone, case):
    model, ids = built_model(backbone, case, **WINDOW), toys.tokens(batch=1, length=LENGTH)
    cost = model_cost(model.config, LENGTH)
    past = model(ids[:, :-1]).past_key_values
    assert counted_flops(lambda: model(ids[:, -1:], past_key_values=past)) == cost.decode_flops
    assert sum(x.numel() * 4 for layer in past.layers for x in (layer.keys, layer.values)) == cost.kv_bytes
    assert cost.kv_bytes < cost.kv_bytes_per_token * LENGTH


@on_every_backbone
@torch.no_grad()
def test_kv_bytes_match_cache_and_conversion(backbone, case):
    model = built_model(backbone, case)
    past = model(toys.tokens(batch=1, length=LENGTH)).past_key_values
    held = sum(x.numel() * 4 for layer in past.layers for x in (layer.keys, layer.values))
    cost = model_cost(model.config, LENGTH)
    assert (cost.kv_bytes, cost.kv_bytes_per_token) == (held, held // LENGTH)
    if case != "stock":
        assert cost.kv_bytes_per_token == cache_bytes(model.config, torch.float32)


@on_every_backbone
def test_stock_figures_match_stock_model(backbone, case):
    report = cost_report(toys.mixed_config(backbone, CASES[case], **HEADS), LENGTH)
    single = {"num_attention_heads": HEADS["num_attention_heads"] // 2} if case == "paired queries" else {}
    assert report["stock"] == asdict(model_cost(toys.stock_config(backbone, **HEADS | single), LENGTH))
    assert report["cost"] == asdict(model_cost(toys.mixed_config(backbone, CASES[case], **HEADS), LENGTH))
    assert report["overhead"].keys() == {name for name, count in report["stock"].items() if count}
    assert all(
        (change == 0) == (report["cost"][name] == report["stock"][name]) for name, change in report["overhead"].items()
    )


def test_explicit_groups_reduce_parameters_and_multiplications():
    mixers = [{"explicit": {"groups": groups, "norm": False}} for groups in (1, 2)]
    one, two = (model_cost(toys.mixed_config("Llama", each, **HEADS), LENGTH) for each in mixers)
    sides_and_layers, heads, size = 4, 4, toys.SIZES["head_dim"]
    scalars = sides_and_layers * heads * (heads - heads // 2)
    assert one.new_parameters - two.new_parameters == scalars
    assert one.prefill_multiplications - two.prefill_multiplications == scalars * size
    assert one.decode_multiplications - two.decode_multiplications == scalars * size * LENGTH  # for each cached token
    assert one.kv_bytes_per_token == two.kv_bytes_per_token


def test_length_zero_is_refused():
    with pytest.raises(ValueError, match="length=0"):
        model_cost(toys.stock_config("Llama"), 0)


def test_cost_of_235b_model_is_computed_on_the_meta_device():
    """Qwen3-235B-A22B: sizes from its config.json, and the two parameter counts in its name."""
    config = crosshead.CrossheadQwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        tie_word_embeddings=False,
        dtype="bfloat16",
        mixers={"explicit": {"key_heads": 2, "value_heads": 2}},
    )
    report = cost_report(config, 32768)
    assert round(report["stock"]["parameters"] / 1e9) == 235
    assert round(report["stock"]["active_parameters"] / 1e9) == 22
    assert report["stock"]["kv_bytes_per_token"] == 94 * 2 * 4 * 128 * 2
    scale_bytes = 94 * 4 * 2 * 2  # each combined head's 1 / rms in two numbers, since keys are normed
    assert report["cost"]["kv_bytes_per_token"] == 94 * 2 * 2 * 128 * 2 + scale_bytes
    assert {parameter.device.type for parameter in on_meta(config).parameters()} == {"meta"}


@pytest.mark.parametrize("backbone", toys.ENCODERS)
def test_encoder_costs_match_formula(backbone):
    size, inner, heads, vocabulary, layers = 32, 40, 4, 61, 2
    config = toys.mixed_config(backbone, {"talking": {}})
    a_layer = 4 * size**2 + 2 * size * inner + 2 * LENGTH * size + 2 * LENGTH * heads**2
    small = 16 if backbone == "Albert" else size  # embedding size
    head = size * small + small * vocabulary
    mapping = size * small if backbone == "Albert" else 0
    cost = model_cost(config, LENGTH)
    assert cost.prefill_multiplications == layers * a_layer + head + mapping
    assert cost.training_flops == 6 * cost.prefill_multiplications
    assert cost.kv_bytes == cost.decode_flops == 0
    shared = 1 if backbone == "Albert" else layers
    assert cost.new_parameters == shared * 2 * heads**2
    assert cost.attention_parameters == shared * (4 * (size**2 + size)) + cost.new_parameters
    assert cost.parameters == toys.mixed_model(backbone, {"talking": {}}).num_parameters()
    with pytest.raises(ValueError, match="length=200"):
        model_cost(config, 200)


def test_selecting_more_experts_than_exist_is_refused():
    config = toys.mixed_model("Qwen3Moe", {}).config
    config.num_experts_per_tok = config.num_experts + 1
    with pytest.raises(ValueError, match=f"num_experts_per_tok={config.num_experts + 1}"):
        model_cost(config, 8)
