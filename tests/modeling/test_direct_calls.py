"""Direct calls of an attention layer: without RoPE or cache, bidirectional, cross-attention, position biases.

Encoders and encoder-decoder models call it in these ways. Outputs and gradients equal a plain reference in float64.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tiers import first
from toys import SIZES, mixed_model

SIZE, HEADS, GROUPS = SIZES["head_dim"], SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
MIXERS: dict[str, dict[str, Any]] = {
    "knocking": {"knocking": {"on": ["query", "key", "value"]}},
    "explicit": {"explicit": {"key_heads": 1, "value_heads": 1}},
    "mixture": {"mixture": {"active_heads": 3, "shared_heads": 1}},
    "mixture by query norms": {"mixture": {"active_heads": 3, "shared_heads": 1, "router": "query_norm"}},
    "talking": {"talking": {"dynamic": ["query_logits", "key_weights"]}},
    "differential": {"differential": {}},
    "gating": {"gating": {}},
    "knocking and mixture": {"knocking": {"form": "linear"}, "mixture": {"active_heads": 2}},
}
QUERIES, OTHERS = 5, 7
CALLS: dict[str, dict[str, Any]] = {
    "without positions": {},
    "with positions": {"positions": True},
    "in both directions": {"causal": False},
    "other keys": {"causal": False, "others": OTHERS},
    "one query, other keys": {"causal": False, "others": OTHERS, "queries": 1},
    "a bias": {"bias": HEADS},
    "a bias and a mask": {"bias": HEADS, "masked": True},
    "a bias for all heads, other keys": {"bias": 1, "causal": False, "others": OTHERS},
    "a bias, one query, other keys": {"bias": HEADS, "causal": False, "others": OTHERS, "queries": 1},
    "a mask, two queries, other keys": {"masked": True, "causal": False, "others": OTHERS, "queries": 2},
}


class Call:
    """The tensors of one call, in float64."""

    def __init__(
        self,
        queries: int = QUERIES,
        others: int = 0,
        causal: bool = True,
        bias: int = 0,
        masked: bool = False,
        positions: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        keys = others or queries
        self.causal = causal
        self.inputs = draw(2, queries, SIZES["hidden_size"]).requires_grad_()
        self.others = draw(2, others, SIZES["hidden_size"]).requires_grad_() if others else None
        self.bias = draw(1, bias, queries, keys).requires_grad_() if bias else None
        self.allowed = torch.ones(2, 1, queries, keys, dtype=torch.bool)
        if causal:
            self.allowed = self.allowed.tril()
        if masked:
            self.allowed[1, :, :, 1:3] = False
        self.mask = self.allowed if masked else None
        angles = torch.arange(queries)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03] * 2, dtype=torch.float64)
        self.positions = (angles.cos()[None], angles.sin()[None]) if positions else None

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors whose gradients are compared."""
        return [x for x in (self.inputs, self.others, self.bias) if x is not None]

    def ours(self, attention: Any) -> Tensor:
        """Return the output of the layer under test (B, T, hidden)."""
        attention.is_causal = self.causal
        options = {"key_value_states": self.others, "position_bias": self.bias}
        output: Tensor = attention(self.inputs, self.positions, self.mask, **options)[0]
        return output


def reference_output(call: Call, layer: Any, mixers: dict[str, dict[str, Any]]) -> Tensor:
    """Return the output of the plain reference (B, T, hidden), computed step by step."""
    weights = dict(layer.named_parameters())
    source = call.inputs if call.others is None else call.others
    q, k, v = (
        functional.linear(x, weights[f"{name}_proj.weight"], weights.get(f"{name}_proj.bias"))
        .unflatten(-1, (-1, SIZE))
        .transpose(1, 2)
        for name, x in (("q", call.inputs), ("k", source), ("v", source))
    )
    routed_by = q
    if "knocking" in mixers:
        q, k, v = (apply_knocking(x, side, weights) for x, side in ((q, "query"), (k, "key"), (v, "value")))
    if "explicit" in mixers:
        k, v = (torch.einsum("ij,bjsd->bisd", weights[f"mixers.explicit.{n}.weight"], x) for n, x in _sides(k, v))
    if "q_norm.weight" in weights:
        q, k = (functional.rms_norm(x, (SIZE,), weights[f"{n}_norm.weight"], 1e-6) for n, x in (("q", q), ("k", k)))
    if call.positions is not None:
        q, k = apply_rotary_pos_emb(q, k, *call.positions)
    if "differential" in mixers:  # pairs of query heads read pairs of key heads
        k = k.unflatten(1, (-1, 2)).repeat_interleave(HEADS // GROUPS, dim=1).flatten(1, 2)
        v = v.unflatten(1, (-1, 2)).repeat_interleave(HEADS // GROUPS, dim=1).flatten(1, 2)
    else:
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    output = reference_weights(call, q, k, v, weights, "talking" in mixers, source)
    if "differential" in mixers:
        output = differential_output(output, v, weights)
    else:
        output = (output @ v).transpose(1, 2)
    if "explicit" in mixers:
        output = functional.rms_norm(output, (SIZE,), weights["mixers.explicit.norm.weight"], 1e-6)
    if "mixture" in mixers:
        output = output * layer.mixers["mixture"](call.inputs, routed_by)[0][..., None]
    if "gating" in mixers:
        output = 2 * torch.sigmoid(call.inputs @ weights["mixers.gating.gate.weight"].T)[..., None] * output
    return functional.linear(output.flatten(2), weights["o_proj.weight"], weights.get("o_proj.bias"))


def _sides(key: Tensor, value: Tensor) -> tuple[tuple[str, Tensor], ...]:
    return ("key", key), ("value", value)


def apply_knocking(x: Tensor, side: str, weights: dict[str, Tensor]) -> Tensor:
    """Return heads after the `knocking` map of a side ("query", "key", "value"), or unchanged if it has none."""
    name = f"mixers.knocking.{side}"
    if f"{name}.weight" in weights:
        return x @ weights[f"{name}.weight"].T
    if f"{name}.up.weight" not in weights:
        return x
    up, gate, down = (weights[f"{name}.{part}.weight"].T for part in ("up", "gate", "down"))
    return 2 * ((x @ up) * torch.sigmoid(x @ gate)) @ down


def reference_weights(
    call: Call, q: Tensor, k: Tensor, v: Tensor, weights: dict[str, Tensor], talking: bool, source: Tensor
) -> Tensor:
    """Return the attention weights (B, H, T, S)."""
    logits = q @ k.mT / SIZE**0.5
    logits = logits if call.bias is None else logits + call.bias
    if talking:
        dynamic = call.inputs @ weights["mixers.talking.query_logits.weight"].T
        maps = weights["mixers.talking.logits.weight"] + dynamic.unflatten(-1, (HEADS, HEADS))
        logits = torch.einsum("btij,bjts->bits", maps, logits)
    attention_weights = logits.masked_fill(~call.allowed, -torch.inf).softmax(-1)
    if talking:
        dynamic = source @ weights["mixers.talking.key_weights.weight"].T
        maps = weights["mixers.talking.weights.weight"] + dynamic.unflatten(-1, (HEADS, HEADS))
        attention_weights = torch.einsum("bsij,bjts->bits", maps, attention_weights)
    return attention_weights


def differential_output(attention_weights: Tensor, v: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return differential outputs (B, T, H / 2, 2 d) in layer 0, whose `lambda_init` is 0.2."""
    first, second = (
        (weights[f"mixers.differential.lambda_q{i}"] @ weights[f"mixers.differential.lambda_k{i}"]).exp()
        for i in (1, 2)
    )
    difference = attention_weights[:, 0::2] - (first - second + 0.2) * attention_weights[:, 1::2]
    output = difference @ torch.cat([v[:, 0::2], v[:, 1::2]], dim=-1)
    return 0.8 * functional.rms_norm(output, (2 * SIZE,), eps=1e-6).transpose(1, 2)


@pytest.mark.parametrize("implementation", first(("sdpa", "eager")))
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("case", MIXERS)
def test_direct_layer_call_equals_reference(case: str, kind: str, implementation: str) -> None:
    """Covers layers with projection biases (Qwen2) and with QK norm (Qwen3)."""
    call = Call(**CALLS[kind])
    # "eager" applies no implicit causal mask, like stock layers. A position bias is merged with a causal mask, except
    # for talking heads, which add the bias before their first map.
    if implementation == "eager" and call.mask is None and (call.bias is None or "talking" in MIXERS[case]):
        call.mask = call.allowed
    for backbone in ("Qwen2", "Qwen3"):
        layer = mixed_model(backbone, MIXERS[case], implementation).double().model.layers[0].self_attn
        leaves = [*call.leaves, *layer.parameters()]
        output, expected = call.ours(layer), reference_output(call, layer, MIXERS[case])
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        direction = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).view_as(output)
        expected_gradients = torch.autograd.grad((expected * direction).sum(), leaves, allow_unused=True)
        gradients = torch.autograd.grad((output * direction).sum(), leaves, allow_unused=True)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            assert ours is not None or theirs is None or theirs.abs().max() == 0
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)
