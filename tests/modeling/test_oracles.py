"""Every mechanism with every option: layer outputs and gradients compared with the oracles."""

from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import oracles
from case_grids import for_each_case_and_backbone, for_each_mechanism_on_each_backbone
from crosshead import MECHANISMS
from oracle_layers import OPTION_CASES, OUTPUT_TOLERANCE, Layer, additive, assert_layer_agrees
from tiers import first, grid
from toys import CASES, MECHANISM_CASES


def test_every_mechanism_has_an_oracle() -> None:
    assert set(oracles.ORACLES) == set(MECHANISMS)


@for_each_mechanism_on_each_backbone
def test_layer_follows_the_oracle(case: str, backbone: str) -> None:
    assert_layer_agrees(Layer(backbone, CASES[case]))


@pytest.mark.parametrize(("case", "backbone"), grid(OPTION_CASES, ("Llama", "Qwen3"), strength=1))
def test_layer_with_options_follows_the_oracle(case: str, backbone: str) -> None:
    assert_layer_agrees(Layer(backbone, OPTION_CASES[case]))


PAIRABLE: dict[str, dict[str, Any]] = {
    "knocking": {"on": ["query", "key", "value"]},
    "explicit": {"value_heads": 1},
    "explicit without norm": {"key_heads": 1, "norm": False},
    "mixture": {"shared_heads": 1, "active_heads": 2},
    "mixture by query norm": {"shared_heads": 0, "active_heads": 2, "router": "query_norm"},
    "talking": {"softmax_heads": 3, "dynamic": ["key_logits"]},
    "differential": {},
    "gating": {},
}
REFUSED = {
    ("explicit", "differential"),
    ("differential", "explicit"),
    ("talking", "differential"),
    ("differential", "talking"),
    ("mixture by query norm", "differential"),
    ("differential", "mixture by query norm"),
    ("mixture", "explicit"),
    ("mixture by query norm", "explicit"),
    ("gating", "explicit"),
}
PAIRS = [
    pair
    for pair in (*combinations(PAIRABLE, 2), *combinations(reversed(PAIRABLE), 2))
    if pair[0].split()[0] != pair[1].split()[0]
]
"""All ordered pairs of different mechanisms: first in one order, then reversed."""


@pytest.mark.parametrize("pair", first(PAIRS, len(PAIRS) // 2), ids="-".join)
def test_mechanism_pair_follows_the_oracle_or_is_refused(pair: tuple[str, str]) -> None:
    """Covers both orders of each pair; the config refuses the pairs in REFUSED."""
    mixers = {name.split()[0]: PAIRABLE[name] for name in pair}
    if pair in REFUSED:
        with pytest.raises(ValueError, match="mixers"):
            Layer("Qwen3", mixers)
    else:
        assert_layer_agrees(Layer("Qwen3", mixers))


@pytest.mark.parametrize(("mechanism", "heads"), grid(MECHANISM_CASES, ((4, 4), (4, 1), (6, 2), (8, 4)), strength=1))
def test_layer_with_other_head_counts_follows_the_oracle(mechanism: str, heads: tuple[int, int]) -> None:
    mixers = {"explicit": {"explicit": {}}}.get(mechanism, MECHANISM_CASES[mechanism])
    if mechanism == "differential" and heads[1] == 1:
        pytest.skip("differential pairs key/value heads")
    assert_layer_agrees(Layer("Llama", mixers, num_attention_heads=heads[0], num_key_value_heads=heads[1]))


@for_each_case_and_backbone
def test_layer_with_cache_follows_the_oracle(case: str, backbone: str) -> None:
    layer = Layer(backbone, CASES[case])
    cache = DynamicCache()
    parts = ((0, 4), (4, 6), (6, 7))
    assert_layer_agrees(layer, lambda: torch.cat([layer.ours(cache, *part) for part in parts], dim=1))


@pytest.mark.parametrize("case", [name for name, mixers in CASES.items() if "mixture" in mixers])
def test_router_gates_and_probabilities_follow_the_oracle(case: str) -> None:
    layer = Layer("Llama", CASES[case])
    outputs: list[Any] = []
    layer.attention.mixers["mixture"].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    layer.ours()
    _, truth = layer.truth()
    gates, probabilities = outputs[0]
    assert (gates - truth["gates"]).abs().max() < OUTPUT_TOLERANCE
    assert (probabilities - truth["probabilities"]).abs().max() < OUTPUT_TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_attention_weights_follow_the_oracle(case: str) -> None:
    layer = Layer("Llama", CASES[case])
    _, weights = layer.attention(
        layer.inputs, position_embeddings=(layer.cos, layer.sin), attention_mask=additive(layer.allowed)
    )
    _, truth = layer.truth()
    assert (weights - truth["weights"]).transpose(1, 2)[layer.rows].abs().max() < OUTPUT_TOLERANCE
