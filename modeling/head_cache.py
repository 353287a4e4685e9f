"""What a mixed layer keeps in the key/value cache.

The library's caches store one tensor for keys and one for values, (B, heads, S, d) each, with equal head counts in
a static cache, and have no place for further numbers. Where a layer's key and value components differ in count, or
numbers go beside the keys, or a mechanism reads a token's heads together, everything is stored as one wide head,
(B, 1, S, features): the same bytes, no more.
"""

import torch
from transformers.cache_utils import Cache

from .mixer import HeadStates


def pass_cache(states: HeadStates, cache: Cache, layer_index: int, side_by_side: bool = False) -> None:
    """Store the states' keys and values and replace them by past and present together.

    `side_by_side` asks for one wide head; a past that has several, as a trained prefix does, goes on as it is.
    """
    key_heads, value_heads = states.key.shape[1], states.value.shape[1]
    past = _stored_form(cache, layer_index)
    wide = states.per_key or key_heads != value_heads or (side_by_side and (past is None or past[0] == 1))
    if not wide:
        _check_form(past, states.key, layer_index)
        states.key, states.value = cache.update(states.key, states.value, layer_index)
        return
    keys, beside = merge_heads(states.key).unsqueeze(1), list(states.per_key.values())
    if beside:
        keys = torch.cat([keys, *(numbers.unsqueeze(1) for numbers in beside)], dim=-1)
    _check_form(past, keys, layer_index)
    keys, values = cache.update(keys, merge_heads(states.value).unsqueeze(1), layer_index)
    keys, values = keys.squeeze(1), values.squeeze(1)
    if beside:
        widths = [key_heads * states.key.shape[-1], *(numbers.shape[-1] for numbers in beside)]
        keys, *beside = keys.split(widths, dim=-1)
        states.per_key = dict(zip(states.per_key, beside, strict=True))
    states.key, states.value = split_heads(keys, key_heads), split_heads(values, value_heads)


def _stored_form(cache: Cache, layer_index: int) -> tuple[int, int] | None:
    """How many heads a layer has stored, and of how many numbers; None where there are none.

    Not the keys themselves: held here, they could not make room for the values that follow.
    """
    keys = getattr(cache.layers[layer_index], "keys", None) if layer_index < len(cache.layers) else None
    return None if keys is None or not keys.numel() else (keys.shape[1], keys.shape[-1])


def _check_form(past: tuple[int, int] | None, keys: torch.Tensor, layer_index: int) -> None:
    """`ValueError` where the past was stored by a layer of another form."""
    if past is not None and past != (keys.shape[1], keys.shape[-1]):
        raise ValueError(
            f"the cache of layer {layer_index} holds {past[0]} heads of {past[1]} numbers, the layer stores "
            f"{keys.shape[1]} of {keys.shape[-1]}: the past comes from another model, or from a prefix that was made "
            "for the stock one"
        )


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, heads, S, d) -> (B, S, heads * d)."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S, heads * d) -> (B, heads, S, d)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)  # sooner than `unflatten`, for a token
