"""`fold --keep-cache`: folds a model with `explicit` to a stock model with fewer KV heads, which hold the components.

The components of a group of KV heads are concatenated to one wide KV head of a stock layer. The logit of query `q_i`
is `q_i . sum_j C_ij B_j = [C_i1 q_i, C_i2 q_i, ...] . [B_1, B_2, ...]`, so each query head in `q_proj` is repeated for
every component, multiplied by its scalar, and the columns of `o_proj` likewise; `k_proj` and `v_proj` keep the
components. With several components per head, RoPE's frequencies repeat within a head: the RoPE type `longrope` has one
factor per frequency. With one component per group, the result is plain grouped-query attention with unchanged head
size; if keys are normalised, only the signs of the scalars matter.
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
from .architectures.mixer_tensors import cache_bytes, mixers_layout
from .compress.layer_rewrites import Tensors
from .sources.tensor_store import DTYPES, TensorStore

HEAD_SIZES: dict[str, Container[int]] = {
    "FlashAttention 2 and 3": range(8, 257, 8),
    "vLLM, Triton attention": range(32, 4097),
    "vLLM on a CPU": {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512},
    "llama.cpp on a CPU": range(2, 4097, 2),
}
"""Engine -> head sizes that its attention supports, for vLLM 0.32 and llama-cpp-python 0.3.36."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the sequence length."""
QWEN2_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
"""Fields of Qwen2's config that Llama's config lacks."""


@dataclass(frozen=True)
class WideHeads:
    """KV heads of the stock model: each is the concatenation of one group's component heads."""

    groups: int
    """Number of KV heads of the stock model."""
    width: int
    """Number of components per KV head."""
    size: int
    """Number of features of a component."""
    query_scale: float
    """Factor on queries that keeps the logits: it offsets the larger head size and RoPE's removed attention factor."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the KV heads for a model's config; `ConversionError` with the reason if no stock model fits."""
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
        """Return the fields of the stock config; `fields` are those of the model's config without mechanisms."""
        heads = {"num_key_value_heads": self.groups, "head_dim": self.width * self.size}
        if self.width == 1:
            return {**fields, **heads}
        content = {key: value for key, value in fields.items() if key not in QWEN2_FIELDS}
        # Llama, also for Qwen2: its config has a field for biases, and engines run it with any head size.
        biased = bool(family_of(config).qkv_bias(config))
        rope = self._repeated_rope(config)
        return {**content, **heads, "model_type": "llama", "attention_bias": biased, "rope_parameters": rope}

    def _repeated_rope(self, config: Any) -> dict[str, Any]:
        """Return RoPE parameters that rotate each component of a wide head by the angles of the original head.

        With `rope_theta` 1, the frequencies are `1 / factor`, without the rounding error of a power, whose effect
        would grow with the position.
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
        """Return a layer's stock attention tensors. A wide q or k head has rows (half, component, feature of half)."""
        heads, queries = layout.key_value_heads, layout.query_heads
        keys, values = (self._scalars(tensors, side, heads) for side in ("key", "value"))
        new = dict(tensors)
        if layout.key_norm_eps is not None:  # the norm cancels a scalar's magnitude, except for its eps
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
        """Return the scalars of each KV head for the components of its group, padded with zeros: (heads, width)."""
        scalars = tensors.get(f"mixers.explicit.{side}.weight")
        if scalars is None:  # this side keeps all heads
            members = heads // self.groups
            scalars = torch.eye(members).repeat(self.groups, 1).to(tensors["q_proj.weight"])
        return torch.nn.functional.pad(scalars, (0, self.width - scalars.shape[1]))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape (components * size, ...) to (groups, width, size, ...), with zeros for missing components."""
        components = rows.unflatten(0, (self.groups, -1, self.size))
        missing = self.width - components.shape[1]
        return torch.cat([components, components.new_zeros(self.groups, missing, *components.shape[2:])], dim=1)

    def _in_halves(self, components: torch.Tensor) -> torch.Tensor:
        """Return the rows of wide heads from (heads, width, size, ...); RoPE pairs features of a head's two halves."""
        return components.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 3)

    def report(self, config: Any, stock: Any, store: TensorStore) -> dict[str, Any]:
        """Return cache size, cost factor and supporting engines, for conversion.json."""
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
    """Return a layer's number of groups, key components and value components; `ConversionError` without `explicit`."""
    explicit = config.mixers_of_layer(layer).get("explicit")
    if explicit is None:
        raise _refusal(f"layer {layer} has no 'explicit', so it caches all heads: fold without --keep-cache")
    layout = mixers_layout(config, layer)
    return explicit.get("groups", 1), layout.key_components, layout.value_components


def _check_rope(config: Any) -> None:
    """Raise `ConversionError` unless stock Llama can express the RoPE frequencies and the attention span."""
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in STATIC_ROPE:
        raise _refusal(
            f"rope_type={rope_type!r} has frequencies that depend on the length; use {', '.join(STATIC_ROPE)}"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise _refusal("some layers have a sliding window, which stock Llama lacks")


def _refusal(reason: str) -> ConversionError:
    return ConversionError(f"--keep-cache cannot fold this model into a stock one: {reason}")


def _rotary(config: Any) -> LlamaRotaryEmbedding:
    """Return the RoPE module of a Llama or Qwen2 config."""
    fields = ("hidden_size", "num_attention_heads", "max_position_embeddings", "rope_parameters")
    values = {name: deepcopy(getattr(config, name)) for name in fields}
    return LlamaRotaryEmbedding(LlamaConfig(**values, head_dim=config.layout_of_layer(0).head_dim))


def _reciprocals(frequencies: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers whose reciprocals best match the frequencies, among 1 / frequency and its neighbours."""
    rounded = 1 / frequencies
    below, above = (torch.nextafter(rounded, rounded * factor) for factor in (0, 2))
    candidates = torch.stack([rounded, below, above])
    return candidates.gather(0, (1 / candidates - frequencies).abs().argmin(0, keepdim=True))[0]
