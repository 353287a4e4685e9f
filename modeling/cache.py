"""The key/value cache of an attention layer with mechanisms.

The library's caches store one tensor for keys and one for values, (B, heads, S, d) each, with equal head counts in a
static cache, and have no place for further numbers. Where key and value components differ in count, or numbers are
cached with the keys, or a mechanism reads a token's heads together, the layer stores one wide head (B, 1, S, features)
of the same size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from .mechanisms.base import AttentionState
from .ops import split_heads, wide_heads

CACHE = "cache" if "cache" in MoeCausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache among arguments and outputs: "cache" from transformers 5.24 on."""


def update_cache(state: AttentionState, cache: Cache, layer_index: int, wide: bool = False) -> None:
    """Store the state's keys and values and replace them by past and present together.

    `wide` stores one wide head, unless the cache already holds several, as after prefix tuning.
    """
    past, uneven = _stored_shape(cache, layer_index), state.key.shape[1] != state.value.shape[1]
    if not (state.key_side_data or uneven or (wide and (past is None or past[0] == 1))):
        _check_past(past, state.key, state.value, layer_index)
        state.key, state.value = cache.update(state.key, state.value, layer_index)
        return
    parts = [wide_heads(state.key), *[numbers.unsqueeze(1) for numbers in state.key_side_data.values()]]
    keys = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    _check_past(past, keys, values := wide_heads(state.value), layer_index)
    keys, values = cache.update(keys, values, layer_index)
    if len(parts) > 1:
        keys, *cached = keys.split([part.shape[-1] for part in parts], dim=-1)
        state.key_side_data = {name: x.squeeze(1) for name, x in zip(state.key_side_data, cached, strict=True)}
    if not wide:
        keys, values = split_heads(keys, state.key.shape[-1]), split_heads(values, state.value.shape[-1])
    state.key, state.value = keys, values


def _stored_shape(cache: Cache, layer_index: int) -> tuple[int, int, int] | None:
    """The stored heads, and the sizes of keys and values; None without any. Numbers: tensors would stay in memory."""
    layer: Any = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    keys = getattr(layer, "keys", None)
    return None if keys is None or not keys.numel() else (keys.shape[1], keys.shape[-1], layer.values.shape[-1])


def _check_past(past: tuple[int, int, int] | None, keys: Tensor, values: Tensor, layer_index: int) -> None:
    """`ValueError` where another kind of layer stored the past."""
    if past not in (None, new := (keys.shape[1], keys.shape[-1], values.shape[-1])):
        raise ValueError(
            f"the cache of layer {layer_index} has (heads, key size, value size) {past}, the layer stores {new}: the "
            "past is of another model, a prefix made for the stock one, or memory that was allocated for stock heads"
        )
