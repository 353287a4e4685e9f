"""What a mixed layer keeps in the key/value cache.

The library's caches store one tensor for keys and one for values, (B, heads, S, d) each, with equal head counts in
a static cache, and have no place for further numbers. Where a layer's key and value components differ in count, or
numbers go beside the keys, everything is stored as one wide head, (B, 1, S, features): the same bytes, no more.
"""

import torch
from transformers.cache_utils import Cache

from .mixer import HeadStates


def pass_cache(states: HeadStates, cache: Cache, layer_index: int) -> None:
    """Store the states' keys and values and replace them by past and present together."""
    if not states.per_key and states.key.shape[1] == states.value.shape[1]:
        states.key, states.value = cache.update(states.key, states.value, layer_index)
        return
    key_heads, value_heads = states.key.shape[1], states.value.shape[1]
    beside = list(states.per_key.values())
    keys, values = cache.update(
        torch.cat([merge_heads(states.key), *beside], dim=-1).unsqueeze(1),
        merge_heads(states.value).unsqueeze(1),
        layer_index,
    )
    widths = [states.key.shape[1] * states.key.shape[-1], *(numbers.shape[-1] for numbers in beside)]
    merged, *beside = keys.squeeze(1).split(widths, dim=-1)
    states.key = split_heads(merged, key_heads)
    states.value = split_heads(values.squeeze(1), value_heads)
    states.per_key = dict(zip(states.per_key, beside, strict=True))


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, heads, S, d) -> (B, S, heads * d)."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S, heads * d) -> (B, heads, S, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
