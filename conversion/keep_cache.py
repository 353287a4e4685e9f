"""`fold --keep-cache`: a model with `explicit` as a stock model with fewer KV heads, which caches the components.

The components of a group of KV heads become one KV head of a stock layer. A query meets a combined key as
`q_i . sum_j C_ij B_j = [C_i1 q_i, C_i2 q_i, ...] . [B_1, B_2, ...]`, so `q_proj` gets one copy of each head for each
component, times its scalar, and `o_proj` the same of its columns; `k_proj` and `v_proj` keep the components. With
several components in a head, RoPE's frequencies repeat: the RoPE type `longrope` has a factor for each of them.
With one component in a group, the result is plain grouped-query attention with unchanged heads, and a norm on keys
leaves only the signs of the scalars.
"""

import math
from collections.abc import Container, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from crosshead.common.errors import ConversionError
from crosshead.modeling.mechanisms.base import HeadLayout

from .architectures.families import family_of
from .architectures.mixer_tensors import cache_bytes, component_heads
from .compress.layer_rewrites import Tensors
from .sources.tensor_store import DTYPES, TensorStore

HEAD_SIZES: dict[str, Container[int]] = {
    "FlashAttention 2 and 3": range(8, 257, 8),
    "vLLM, Triton attention": range(32, 4097),
    "vLLM on a CPU": {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512},
    "llama.cpp on a CPU": range(2, 4097, 2),
}
"""Engine -> the head sizes that its attention takes: those of vLLM 0.32 and llama-cpp-python 0.3.36."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the length of the text."""
QWEN2_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
"""Fields of Qwen2's config that Llama's lacks."""


@dataclass(frozen=True)
class WideHeads:
    """The KV heads of the stock model."""

    groups: int
    """KV heads."""
    width: int
    """Components in a KV head."""
    size: int
    """Features of a component."""
    query_scale: float
    """The factor on queries that keeps the logits, as the stock model divides by the root of its wider heads."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """The heads for a model's configuration; `ConversionError` with the reason if no stock model can have them."""
        counts = {_counts(config, layer) for layer in range(config.num_hidden_layers)}
        if len(counts) > 1:
            listed = ", ".join(f"{keys} of keys and {values} of values" for _, keys, values in sorted(counts))
            raise _refusal(f"its layers differ in component heads ({listed}), and stock layers are all alike")
        groups, *components = counts.pop()
        layout: HeadLayout = config.layout_of_layer(0)
        width, heads = max(components) // groups, layout.key_value_heads
        if groups * width >= heads:
            raise _refusal(
                f"the stock cache would hold {groups * width} heads, as many as without it (keys have {components[0]} "
                f"components, values {components[1]}, of {heads} heads): fold without --keep-cache"
            )
        if width > 1 and layout.key_norm_eps is not None:
            raise _refusal(
                f"keys are normalised, which needs one component in each group (there are {width}): convert with "
                f"groups={max(components)}"
            )
        if width == 1:
            return cls(groups, width, layout.head_dim, 1.0)
        _check_rope(config)
        return cls(groups, width, layout.head_dim, math.sqrt(width) * _rotary(config).attention_scaling ** 2)

    def config_fields(self, config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The stock configuration's content, from that without cross-head fields."""
        heads = {"num_key_value_heads": self.groups, "head_dim": self.width * self.size}
        if self.width == 1:
            return {**fields, **heads}
        content = {key: value for key, value in fields.items() if key not in QWEN2_FIELDS}
        # Qwen2's own class has biases without a field for them. Engines run Llama's with any head size.
        biased = bool(family_of(config).qkv_bias(config))
        rope = self._repeated_rope(config)
        return {**content, **heads, "model_type": "llama", "attention_bias": biased, "rope_parameters": rope}

    def _repeated_rope(self, config: Any) -> dict[str, Any]:
        """RoPE parameters by which each component in a wide head turns as it did in its own head.

        With a base of 1, the frequencies are `1 / factor`, without the rounding of a power: an error in a frequency
        grows with the position.
        """
        factors = _reciprocals(_rotary(config).inv_freq).repeat(self.width).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": 1.0,
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
        }

    def rewrite(self, tensors: Tensors, layout: HeadLayout) -> Tensors:
        """A layer's stock attention tensors. Rows of a wide head are (half, component, feature in the half)."""
        heads, queries = layout.key_value_heads, layout.query_heads
        keys, values = (self._scalars(tensors, side, heads) for side in ("key", "value"))
        new = dict(tensors)
        if layout.key_norm_eps is not None:  # only a scalar's sign remains; the mean is for the eps
            mean = keys.abs().unflatten(0, (self.groups, -1)).mean(1).flatten()
            for name in ("k_proj.weight", "k_proj.bias"):
                if name in tensors:
                    new[name] = torch.einsum("r...,r->r...", tensors[name], mean.repeat_interleave(self.size))
            keys = keys.sign()
        for part in ("weight", "bias"):
            if (rows := tensors.get(f"q_proj.{part}")) is not None:
                scalars = keys.repeat_interleave(queries // heads, dim=0) * self.query_scale
                copies = torch.einsum("ic,if...->icf...", scalars, rows.unflatten(0, (queries, -1)))
                new[f"q_proj.{part}"] = self._in_halves(copies)
            if (rows := new.get(f"k_proj.{part}")) is not None:
                new[f"k_proj.{part}"] = self._in_halves(self._padded(rows))
            if (rows := new.get(f"v_proj.{part}")) is not None:
                new[f"v_proj.{part}"] = self._padded(rows).flatten(0, 2)
        scalars = values.repeat_interleave(queries // heads, dim=0)
        columns = tensors["o_proj.weight"].unflatten(1, (queries, -1))
        new["o_proj.weight"] = torch.einsum("nif,ic->nicf", columns, scalars).flatten(1)
        if self.width > 1 and "q_proj.bias" in new and "o_proj.bias" not in new:  # Llama has either all biases or none
            new["o_proj.bias"] = torch.zeros_like(new["o_proj.weight"][:, 0])
        return new

    def _scalars(self, tensors: Tensors, side: str, heads: int) -> torch.Tensor:
        """The scalars of each KV head for the components of its group: (heads, width)."""
        scalars = tensors.get(f"mixers.explicit.{side}.weight")
        if scalars is None:  # this side has all its heads
            members = heads // self.groups
            scalars = torch.eye(members).repeat(self.groups, 1).to(tensors["q_proj.weight"])
        return torch.nn.functional.pad(scalars, (0, self.width - scalars.shape[1]))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """(components * size, ...) -> (groups, width, size, ...), with zeros for components that a side lacks."""
        components = rows.unflatten(0, (self.groups, -1, self.size))
        missing = self.width - components.shape[1]
        return torch.cat([components, components.new_zeros(self.groups, missing, *components.shape[2:])], dim=1)

    def _in_halves(self, components: torch.Tensor) -> torch.Tensor:
        """(heads, width, size, ...) -> the rows of wide heads, whose two halves RoPE rotates together."""
        return components.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 3)

    def report(self, config: Any, stock: Any, store: TensorStore) -> dict[str, Any]:
        """The cache, the cost and the engines' limits, for the record."""
        dtype = DTYPES[store.entries["model.layers.0.self_attn.k_proj.weight"].dtype]
        plain = family_of(config).crosshead.from_dict({**config.to_dict(), "mixers": {}})
        size = self.width * self.size
        return {
            "model_type": stock.model_type,
            "kv_heads": self.groups,
            "head_size": size,
            "kv_bytes_per_token": 2 * self.groups * size * dtype.itemsize * config.num_hidden_layers,
            "kv_bytes_per_token_without_keep_cache": cache_bytes(plain, dtype),
            "growth_of_q_proj_o_proj_and_attention": self.width,
            "head_size_fits": {engine: size in sizes for engine, sizes in HEAD_SIZES.items()},
        }


def _counts(config: Any, layer: int) -> tuple[int, int, int]:
    """A layer's groups, and its component heads of keys and of values; `ConversionError` if they cannot be kept."""
    explicit = config.mixers_of_layer(layer).get("explicit")
    if explicit is None:
        raise _refusal(f"layer {layer} has no 'explicit', so it caches all heads: fold without --keep-cache")
    return (explicit.get("groups", 1), *component_heads(config, layer))


def _check_rope(config: Any) -> None:
    """`ConversionError` unless stock Llama can repeat the frequencies, and see as many tokens."""
    kind = config.rope_parameters["rope_type"]
    if kind not in STATIC_ROPE:
        raise _refusal(f"rope_type={kind!r} has frequencies that depend on the length; use {', '.join(STATIC_ROPE)}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise _refusal("some layers have a sliding window, which stock Llama lacks")


def _refusal(reason: str) -> ConversionError:
    return ConversionError(f"--keep-cache cannot fold this model into a stock one: {reason}")


def _rotary(config: Any) -> LlamaRotaryEmbedding:
    """RoPE of a Llama or Qwen2 configuration."""
    fields = ("hidden_size", "num_attention_heads", "max_position_embeddings", "rope_parameters")
    given = {name: deepcopy(getattr(config, name)) for name in fields}
    return LlamaRotaryEmbedding(LlamaConfig(**given, head_dim=config.layout_of_layer(0).head_dim))


def _reciprocals(frequencies: torch.Tensor) -> torch.Tensor:
    """Numbers in float32 whose reciprocals are closest to the frequencies, of all next to the rounded reciprocal."""
    rounded = 1 / frequencies
    below, above = (torch.nextafter(rounded, rounded * factor) for factor in (0, 2))
    candidates = torch.stack([rounded, below, above])
    return candidates.gather(0, (1 / candidates - frequencies).abs().argmin(0, keepdim=True))[0]
