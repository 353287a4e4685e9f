"""Compares one crosshead attention layer in float64 with the oracle: outputs and gradients."""

from collections.abc import Callable
from typing import Any

import torch

import oracle_arithmetic
import oracles
from toys import SIZES, mixed_model

OUTPUT_TOLERANCE = 1e-10
GRADIENT_TOLERANCE = 1e-8
LAYER = 1

OPTION_CASES: dict[str, dict[str, Any]] = {
    **{
        f"knocking {form} on {'+'.join(on)}": {"knocking": {"form": form, "on": on}}
        for form in ("mlp", "linear", "gate")
        for on in (["value"], ["query", "key", "value"])
    },
    "explicit as many components": {"explicit": {}},
    "explicit without norm": {"explicit": {"norm": False, "key_heads": 1}},
    "explicit keys": {"explicit": {"on": ["key"], "key_heads": 1}},
    "explicit values": {"explicit": {"on": ["value"], "value_heads": 1, "norm": False}},
    "explicit in groups": {"explicit": {"groups": 2}},
    **{
        f"mixture {router} {gate} {scale} {shared} shared": {
            "mixture": {
                "shared_heads": shared,
                "active_heads": active,
                "router": router,
                "gate": gate,
                "gate_scale": scale,
            }
        }
        for router in ("two_stage", "query_norm")
        for gate, scale in (("weighted", "unit"), ("weighted", "paper"), ("binary", "unit"))
        for shared, active in ((0, 2), (1, 3), (2, 4))
    },
    "talking": {"talking": {}},
    "talking logits": {"talking": {"on": ["logits"], "dynamic": ["query_logits"]}},
    "talking weights": {"talking": {"on": ["weights"], "dynamic": ["key_weights"]}},
    "talking fewer softmax heads": {"talking": {"softmax_heads": 3, "dynamic": ["key_logits", "query_weights"]}},
    "differential without norm": {"differential": {"norm": False}},
    "differential with half values": {"differential": {"half_values": True}, "knocking": {"on": ["value"]}},
    "differential version 2": {"differential": {"version": 2}},
    "differential version 2 + mixture": {
        "mixture": {"shared_heads": 1, "active_heads": 2},
        "gating": {},
        "explicit": {"value_heads": 1, "norm": False},
        "differential": {"version": 2},
    },
    "differential + mixture": {
        "differential": {},
        "mixture": {"shared_heads": 1, "active_heads": 2, "gate_scale": "paper"},
    },
    "mixture before knocking": {
        "mixture": {"shared_heads": 1, "active_heads": 2, "router": "query_norm"},
        "knocking": {"on": ["query"]},
    },
}
"""Mechanism configurations that use every option at least once, together with the cases of the toys."""


def rope_tables(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RoPE cosines and sines (B, T, d) in float64; transformers computes them in float32."""
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[..., None].double() * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


def visible(padding: list[int], length: int) -> torch.Tensor:
    """Return a causal mask (B, T, S) with `padding` hidden tokens on the left of each sequence."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    real = torch.stack([torch.arange(length) >= count for count in padding])
    return causal & real[:, None, :]


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """Return an additive mask (B, 1, T, S), as transformers passes it to eager attention."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)[
        :, None
    ]


def oracle_view(config: Any, layer: int) -> tuple[dict[str, dict[str, Any]], oracle_arithmetic.LayerShape]:
    """Return the oracle's arguments for a layer: complete mechanism options, defaults filled in, and its shape."""
    absent = {
        "explicit": {"key_heads": config.num_key_value_heads, "value_heads": config.num_key_value_heads},
        "talking": {"softmax_heads": config.num_attention_heads},
    }
    mixers = {name: absent.get(name, {}) | options for name, options in config.mixers_of_layer(layer).items()}
    shape = oracle_arithmetic.LayerShape(
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=SIZES["head_dim"],
        layer_index=layer,
        norm_eps=config.rms_norm_eps,
        has_qk_norm="qwen3" in config.model_type,
    )
    return mixers, shape


class Layer:
    """One attention layer in float64 with inputs (2, 7, hidden), and the oracle's arguments for it."""

    def __init__(self, backbone: str, mixers: dict[str, Any], padding: tuple[int, int] = (0, 2), **changes: Any):
        model = mixed_model(backbone, mixers, attention_dropout=0.0, **changes).double()
        self.attention = model.model.layers[LAYER].self_attn
        config = model.config
        self.mixers, self.shape = oracle_view(config, LAYER)
        length = 7
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(2, length, config.hidden_size, generator=generator, dtype=torch.float64)
        self.inputs = self.inputs * torch.linspace(0.5, 2.0, config.hidden_size, dtype=torch.float64)
        self.allowed = visible(list(padding), length)
        self.rows = self.allowed.any(-1)  # a query without visible keys has no defined gradient
        self.cos, self.sin = rope_tables(torch.arange(length).expand(2, -1), SIZES["head_dim"])

    def ours(self, cache: Any = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the layer's output for the tokens from `start` to `stop`."""
        part = slice(start, stop)
        output, _ = self.attention(
            self.inputs[:, part],
            position_embeddings=(self.cos[:, part], self.sin[:, part]),
            attention_mask=additive(self.allowed[:, part, :stop]),
            past_key_values=cache,
        )
        return output

    def truth(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the oracle's output (B, T, hidden) and extras."""
        weights = dict(self.attention.named_parameters())
        return oracles.attention_layer(self.inputs, weights, self.shape, self.mixers, self.cos, self.sin, self.allowed)

    def gradients(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of a randomly weighted sum over the real rows, by input and parameter name."""
        named = {"inputs": self.inputs, **dict(self.attention.named_parameters())}
        return gradients(output * self.rows[..., None], named)


def gradients(output: torch.Tensor, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a randomly weighted sum of the output, by name; zeros for unused tensors."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    results = torch.autograd.grad((output * direction).sum(), list(named.values()), allow_unused=True)
    pairs = zip(named.items(), results, strict=True)
    return {name: torch.zeros_like(x) if gradient is None else gradient for (name, x), gradient in pairs}


def assert_layer_agrees(layer: Layer, run: Callable[[], torch.Tensor] | None = None, least: float = 0.1) -> None:
    """Assert that outputs and all gradients equal the oracle's; `least` is a lower bound of the largest output."""
    layer.inputs.requires_grad_(True)
    ours, (truth, _) = (run or layer.ours)(), layer.truth()
    assert (ours - truth)[layer.rows].abs().max() < OUTPUT_TOLERANCE
    assert truth[layer.rows].abs().max() > least
    results, expected = layer.gradients(ours), layer.gradients(truth)
    for name, gradient in expected.items():
        assert (results[name] - gradient).abs().max() < GRADIENT_TOLERANCE, name


def assert_sdpa_agrees(
    mixers: dict[str, Any], heads: tuple[int, int], padding: tuple[int, int] | None, implementation: str = "sdpa"
) -> None:
    """Assert that a layer under SDPA agrees with the oracle. `heads`: (query, key/value); `padding` None: no mask."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    layer = Layer("Qwen3", mixers, padding or (0, 0), **sizes)
    layer.attention.config._attn_implementation = implementation
    mask = None if padding is None else layer.allowed[:, None]

    def run() -> torch.Tensor:
        output, _ = layer.attention(layer.inputs, (layer.cos, layer.sin), mask)
        return output

    assert_layer_agrees(layer, run)
