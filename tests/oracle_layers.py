"""One attention layer of ours in float64 beside the oracle's view of it."""

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
"""Every option of every mechanism at least once, beside the cases of the toys."""


def rope_tables(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 tables (B, T, d): the library computes its own in float32."""
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[..., None].double() * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


def visible(padding: list[int], length: int) -> torch.Tensor:
    """(B, T, S): causal, and without the padding on the left of each sequence."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    real = torch.stack([torch.arange(length) >= count for count in padding])
    return causal & real[:, None, :]


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """The mask as the library hands it to eager attention."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)[
        :, None
    ]


def oracle_view(config: Any, layer: int) -> tuple[dict[str, dict[str, Any]], oracle_arithmetic.LayerShape]:
    """What the oracle wants to know of a layer: complete options, counts that a config may leave out included."""
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
    """One attention layer in float64 with inputs, and the oracle's view of it."""

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
        self.rows = self.allowed.any(-1)  # a query that sees nothing has no defined gradient
        self.cos, self.sin = rope_tables(torch.arange(length).expand(2, -1), SIZES["head_dim"])

    def ours(self, cache: Any = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The layer's output for the tokens from `start` to `stop`."""
        part = slice(start, stop)
        output, _ = self.attention(
            self.inputs[:, part],
            position_embeddings=(self.cos[:, part], self.sin[:, part]),
            attention_mask=additive(self.allowed[:, part, :stop]),
            past_key_values=cache,
        )
        return output

    def truth(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The oracle's output."""
        weights = dict(self.attention.named_parameters())
        return oracles.attention_layer(self.inputs, weights, self.shape, self.mixers, self.cos, self.sin, self.allowed)

    def gradients(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of a lopsided sum over the real rows, by input and parameter."""
        named = {"inputs": self.inputs, **dict(self.attention.named_parameters())}
        return gradients(output * self.rows[..., None], named)


def gradients(output: torch.Tensor, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of a lopsided sum."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = torch.autograd.grad((output * direction).sum(), list(named.values()), allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    return {name: torch.zeros_like(x) if gradient is None else gradient for (name, x), gradient in pairs}


def assert_layer_agrees(layer: Layer, run: Callable[[], torch.Tensor] | None = None, least: float = 0.1) -> None:
    """Outputs, of which one is larger than the least, then every gradient."""
    layer.inputs.requires_grad_(True)
    ours, (truth, _) = (run or layer.ours)(), layer.truth()
    assert (ours - truth)[layer.rows].abs().max() < OUTPUT_TOLERANCE
    assert truth[layer.rows].abs().max() > least
    found, expected = layer.gradients(ours), layer.gradients(truth)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < GRADIENT_TOLERANCE, name


def assert_sdpa_agrees(
    mixers: dict[str, Any], heads: tuple[int, int], padding: tuple[int, int] | None, implementation: str = "sdpa"
) -> None:
    """A layer of so many query and key/value heads under SDPA, with a mask, or without where nothing is padded."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    layer = Layer("Qwen3", mixers, padding or (0, 0), **sizes)
    layer.attention.config._attn_implementation = implementation
    mask = None if padding is None else layer.allowed[:, None]

    def run() -> torch.Tensor:
        output, _ = layer.attention(layer.inputs, (layer.cos, layer.sin), mask)
        return output

    assert_layer_agrees(layer, run)
