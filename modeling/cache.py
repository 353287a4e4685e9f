"""The key/value cache of an attention layer with mechanisms.

A cache of transformers stores one key tensor and one value tensor per layer, (B, heads, S, d) each. A static cache
needs equal head counts, and no cache has a place for further tensors. A layer with different numbers of key and value
heads, with side data to cache with its keys, or with a mechanism that reads all heads of a token together therefore
stores one wide head (B, 1, S, features) of the same total size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from .mechanisms.base import AttentionState
from .ops import split_heads, wide_heads

CACHE = "cache" if hasattr(MoeCausalLMOutputWithPast, "cache") else "past_key_values"  # renamed in transformers 5.24


def update_cache(state: AttentionState, cache: Cache, layer_index: int, wide: bool = False) -> None:
    """Append keys, values and side data to the cache, and replace those of the state by past and present together.

    `wide` stores the heads as one wide head, unless the cache already holds separate heads, as after prefix tuning.
    """
    past_shape, unequal = _stored_shape(cache, layer_index), state.key.shape[1] != state.value.shape[1]
    if not (state.key_side_data or unequal or (wide and (past_shape is None or past_shape[0] == 1))):
        _check_past(past_shape, state.key, state.value, layer_index)
        state.key, state.value = cache.update(state.key, state.value, layer_index)
        return
    parts = [wide_heads(state.key), *[data.unsqueeze(1) for data in state.key_side_data.values()]]
    keys = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    _check_past(past_shape, keys, values := wide_heads(state.value), layer_index)
    keys, values = cache.update(keys, values, layer_index)
    if len(parts) > 1:
        keys, *side_data = keys.split([part.shape[-1] for part in parts], dim=-1)
        state.key_side_data = {name: x.squeeze(1) for name, x in zip(state.key_side_data, side_data, strict=True)}
    if not wide:
        keys, values = split_heads(keys, state.key.shape[-1]), split_heads(values, state.value.shape[-1])
    state.key, state.value = keys, values


def _stored_shape(cache: Cache, layer_index: int) -> tuple[int, int, int] | None:
    """Return (heads, key size, value size) of the cached tensors, None if empty; ints, which keep no tensor alive."""
    layer: Any = cache.layers[layer_index] if layer_index < len(cache.layers) else None
    keys = getattr(layer, "keys", None)
    return None if keys is None or not keys.numel() else (keys.shape[1], keys.shape[-1], layer.values.shape[-1])


def _check_past(past: tuple[int, int, int] | None, keys: Tensor, values: Tensor, layer_index: int) -> None:
    """Raise `ValueError` if the cached keys and values have other head counts or sizes than the new ones."""
    if past not in (None, new := (keys.shape[1], keys.shape[-1], values.shape[-1])):
        raise ValueError(
            f"the cache of layer {layer_index} has (heads, key size, value size) {past}, the layer stores {new}: the "
            "past is of another model, a prefix made for the stock one, or memory that was allocated for stock heads"
        )
