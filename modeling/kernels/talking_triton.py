"""Talking-Heads on a GPU, by Triton: the forward pass, as an operator.

No logit or weight leaves the chip: memory beside the outputs is two numbers for each query and softmax head. The
backward pass is that of `talking_blocks`, block by block in torch, from the same saved inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch

try:  # what looks through this file for packages that it must have passes over a `try`
    import triton
    import triton.language as tl
except ImportError:
    raise

from ..mechanisms.talking_blocks import talking_autograd, talking_blocks, talking_fake, talking_keep
from .talking_kernels_triton import softmax_norms, weighted_values
from .visible_triton import seen_keys
from .where_triton_runs import product_precision

FACTORS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What the factors of products are, by the dtype of queries, keys and values."""


@dataclass(frozen=True)
class TalkingCall:
    """The arguments of `talking_blocks`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    logits_map: torch.Tensor
    logits_key_map: torch.Tensor | None
    weights_map: torch.Tensor
    weights_key_map: torch.Tensor | None
    mask: torch.Tensor | None
    scaling: float
    causal: bool

    def heads(self) -> int:
        """The most of queries, softmax and outputs."""
        return max(*self.logits_map.shape[2:], *self.weights_map.shape[2:])


@dataclass(frozen=True)
class Tile:
    """What a program of 8 warps has at a time, of all heads."""

    queries: int
    keys: int
    features: int
    """Of queries and keys, multiplied at once."""
    outputs: int
    """Features of the outputs; where there are more, other programs have them."""
    stages: int
    """Of loads, under way together."""


TILES = {
    (16, False, 2): Tile(32, 16, 64, 64, 2),
    (16, True, 2): Tile(16, 16, 32, 64, 1),
    (32, False, 2): Tile(16, 16, 32, 64, 1),
    (16, False, 4): Tile(16, 16, 32, 32, 1),
    (16, True, 4): Tile(16, 16, 16, 32, 1),
    (32, False, 4): Tile(16, 16, 16, 32, 1),
}
"""By padded heads, whether queries or keys have maps of their own, and bytes of a number; for an H100's memory."""


def fits(call: TalkingCall) -> bool:
    """Whether a program can have all heads; else the call is left to the blocks."""
    return _size(call) in TILES


def attend_in_tiles(call: TalkingCall) -> torch.Tensor:
    """Outputs (B, T, heads, features)."""
    query, key, value = (x.contiguous() for x in (call.query, call.key, call.value))
    (batch, heads, queries, size), (groups, keys, features) = query.shape, value.shape[1:]
    counts = (heads, call.logits_map.shape[2], call.weights_map.shape[2])  # of queries, softmax and values
    output = value.new_empty(batch, queries, counts[2], features)
    norms = torch.empty(2, batch, counts[1], queries, dtype=torch.float32, device=query.device)
    (spans, mask, *of_mask, mask_heads), kind = _mask(call)
    first, second = _Maps(call.logits_map, call.logits_key_map), _Maps(call.weights_map, call.weights_key_map)
    tile, padded = TILES[_size(call)], [padded_size(count) for count in counts]
    narrow, wide = min(tile.features, padded_size(size)), min(tile.outputs, padded_size(features))
    of_call = (queries, keys, batch * mask_heads * queries, call.scaling, mask_heads, heads, groups, counts[1])
    last = (kind, call.causal, FACTORS[query.dtype], product_precision(query.dtype))
    options = {"num_warps": 8, "num_stages": tile.stages}
    blocks = triton.cdiv(queries, tile.queries)
    tensors: tuple[torch.Tensor, ...] = (query, key, *first.tensors, mask, spans, norms)
    sizes: tuple[int, ...] = (size, *padded[:2], tile.queries, tile.keys, narrow)
    softmax_norms[blocks, batch](*tensors, *first.strides, *of_mask, *of_call, *sizes, *first.own, *last, **options)
    tensors = (query, key, value, output, *first.tensors, *second.tensors, mask, spans, norms)
    strides = (*first.strides, *second.strides, *of_mask)
    sizes = (counts[2], size, features, *padded, tile.queries, tile.keys, narrow, wide)
    weighted_values[blocks, batch, triton.cdiv(features, wide)](
        *tensors, *strides, *of_call, *sizes, *first.own, *second.own, *last, **options
    )
    return output


class _Maps:
    """The maps of one stage, as kernels take them."""

    def __init__(self, of_queries: torch.Tensor, of_keys: torch.Tensor | None) -> None:
        of_queries = of_queries.contiguous()
        self.tensors = (of_queries, of_queries if of_keys is None else of_keys.contiguous())
        shape, strides = of_queries.shape, of_queries.stride()
        self.strides = tuple(0 if shape[i] == 1 else strides[i] for i in (0, 1))
        """How far apart sequences and queries have theirs."""
        self.own = (shape[1] > 1, of_keys is not None)
        """Whether each query has one of its own, and each key."""


def padded_size(size: int) -> int:
    """The power of two, from 16 on, that products are made of."""
    return max(16, triton.next_power_of_2(size))


def _size(call: TalkingCall) -> tuple[int, bool, int]:
    """As in the table of tiles."""
    maps, key_maps = (call.logits_map, call.weights_map), (call.logits_key_map, call.weights_key_map)
    own = any(x.shape[1] > 1 for x in maps) or any(x is not None for x in key_maps)
    return padded_size(call.heads()), own, call.query.element_size()


def _mask(call: TalkingCall) -> tuple[tuple[Any, ...], int]:
    """What `seen_keys` finds, the mask, its strides and heads; then 1 if it hides, 2 if it is added, 0 without one."""
    if call.mask is None:
        nothing = torch.empty(0, dtype=torch.int32, device=call.query.device)
        return (nothing, nothing, 0, 0, 0, 0, 1), 0
    mask = call.mask.expand(call.query.shape[0], -1, call.query.shape[2], -1)
    hides = mask.dtype == torch.bool
    seen = mask if hides else mask > torch.finfo(mask.dtype).min
    return (seen_keys(seen), mask, *mask.stride(), mask.shape[1]), 1 if hides else 2


@torch.library.custom_op("crosshead_triton::talking", mutates_args=())
def talking_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    logits_map: torch.Tensor,
    logits_key_map: torch.Tensor | None,
    weights_map: torch.Tensor,
    weights_key_map: torch.Tensor | None,
    mask: torch.Tensor | None,
    scaling: float,
    causal: bool,
) -> torch.Tensor:
    """As `talking_blocks`, for a call that `fits`."""
    call = TalkingCall(
        query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal
    )
    with torch.cuda.device_of(query):  # on which kernels start, whichever is the current one
        return attend_in_tiles(call)


talking_tiles.register_fake(talking_fake)
talking_tiles.register_autograd(talking_autograd, setup_context=talking_keep)


def talking_operator(*call: Any) -> torch.Tensor:
    """The kernels where they fit, else `talking_blocks`, whose arguments these are."""
    attend = talking_tiles if fits(TalkingCall(*call)) else talking_blocks
    return attend(*call)
