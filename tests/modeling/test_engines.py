"""Imitates serving engines: attention with two-dimensional outputs, replaced RMSNorm classes, a parsed forward."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toys import mixed_model, tokens

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "knocking linear": ("Llama", {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}),
    "knocking mlp": ("Qwen3", {"knocking": {"on": ["query", "key", "value"]}}),
    "explicit with a norm": ("Llama", {"explicit": {}}),
    "explicit, fewer components": ("Qwen2", {"explicit": {"key_heads": 1, "value_heads": 1, "norm": False}}),
    "explicit with a norm and biases": ("Qwen2", {"explicit": {"key_heads": 1}}),
    "explicit without a norm": ("Llama", {"explicit": {"on": ["value"], "norm": False}}),
    "explicit in groups": ("Llama", {"explicit": {"groups": 2, "norm": False}}),
    "explicit on normed keys in groups": ("Qwen3", {"explicit": {"groups": 2}}),
    "explicit on normed keys": ("Qwen3", {"explicit": {"key_heads": 1, "value_heads": 1, "norm": False}}),
    "explicit on normed keys with a norm": ("Qwen3", {"explicit": {}}),
    "mixture": ("Llama", {"mixture": {"active_heads": 3, "shared_heads": 1}}),
    "mixture by query norms": ("Qwen3", {"mixture": {"active_heads": 3, "shared_heads": 1, "router": "query_norm"}}),
    "knocking and mixture": ("Llama", {"knocking": {}, "mixture": {"active_heads": 3}}),
    "gating": ("Qwen2", {"gating": {}}),
}


@pytest.fixture
def engine_attention_calls() -> Iterator[list[int]]:
    """Registers an attention function "vllm"; yields the layer index of each of its calls."""
    layer_indices: list[int] = []

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        assert isinstance(module.layer_idx, int)
        assert (query.shape[1], key.shape[1]) == (4, 2) and key.shape == value.shape
        layer_indices.append(module.layer_idx)
        options = {"scaling": options["scaling"], "is_causal": True}
        output, _ = sdpa_attention_forward(module, query, key, value, None, **options)
        return output.reshape(-1, output.shape[-2] * output.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"] = attend
    yield layer_indices
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


class EngineRMSNorm(nn.Module):
    """The RMSNorm of an engine, with the weight of the model's norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, getattr(norm, "eps", None) or norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def replace_norms(module: nn.Module) -> int:
    """Replace every module whose class name ends in RMSNorm by the engine's norm; return their number."""
    replaced = 0
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, EngineRMSNorm(child))
            replaced += 1
        else:
            replaced += replace_norms(child)
    return replaced


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_engine_attention_and_norms_give_the_same_logits(case: str, engine_attention_calls: list[int]) -> None:
    backbone, mixers = CASES[case]
    model, ids = mixed_model(backbone, mixers, "sdpa"), tokens(1, 9)
    expected = model(ids, use_cache=False).logits
    assert replace_norms(model) >= 5
    model.config._attn_implementation = "vllm"
    logits = model(ids, use_cache=False, attention_mask=None).logits
    assert engine_attention_calls == [0, 1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism", ("talking", "differential"))
@pytest.mark.parametrize("engine", ("vllm", "sglang"))
def test_talking_and_differential_are_refused_in_engines(mechanism: str, engine: str) -> None:
    model = mixed_model("Llama", {mechanism: {}}, "sdpa")
    model.config._attn_implementation = engine
    with pytest.raises(ValueError, match=f"attn_implementation='{engine}' .*'{mechanism}'"):
        model(tokens(1, 5), use_cache=False)


def test_forward_source_has_attention_call_that_engines_parse() -> None:
    attention = mixed_model("Llama", {"knocking": {}}).model.layers[0].self_attn
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(attention).forward)))
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "ALL_ATTENTION_FUNCTIONS.get_interface"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    interface_calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    assert len(names) == len(interface_calls) == 1
    scaling = {word.arg: ast.unparse(word.value) for word in interface_calls[0].keywords}["scaling"]
    assert scaling == "self.scaling"


def test_tensor_parallel_plan_shards_attention_only_in_engines() -> None:
    """Attention is sharded only if every mechanism supports it."""
    for mixers, splits in (
        ({"knocking": {}, "mixture": {"active_heads": 2}}, True),
        ({"mixture": {"active_heads": 2, "router": "query_norm"}}, False),
        ({"explicit": {}}, False),
    ):
        config = mixed_model("Qwen3", mixers, "sdpa").config
        assert not any("self_attn" in module for module in config.base_model_tp_plan)
        assert not config.attention_plan()
        config._attn_implementation = "vllm"
        assert ("layers.*.self_attn.q_proj" in config.attention_plan()) == splits
