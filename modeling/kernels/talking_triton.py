"""Talking-Heads attention in Triton: the forward pass, as a custom op.

Logits and weights stay on the chip; besides the outputs, the kernels store two numbers per query and softmax head. The
backward pass is the PyTorch one of `talking_blocks`, which processes blocks of queries from the same saved inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from ..mechanisms.talking_blocks import talking_autograd, talking_blocks, talking_fake, talking_keep
from .key_spans_triton import key_spans
from .talking_kernels_triton import softmax_stats, weighted_values
from .triton_support import product_precision

OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtype of the matmul operands, per dtype of q, k and v."""


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
        """Return the maximum of the numbers of query, softmax and output heads."""
        return max(*self.logits_map.shape[2:], *self.weights_map.shape[2:])


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a program of 8 warps, which holds all heads of the tile."""

    queries: int
    keys: int
    features: int
    """Features of queries and keys per `tl.dot`."""
    outputs: int
    """Output features per program; further features are computed by other programs."""
    stages: int
    """Number of pipeline stages (`num_stages`)."""


TILES = {
    (16, False, 2): Tile(32, 16, 64, 64, 2),
    (16, True, 2): Tile(16, 16, 32, 64, 1),
    (32, False, 2): Tile(16, 16, 32, 64, 1),
    (16, False, 4): Tile(16, 16, 32, 32, 1),
    (16, True, 4): Tile(16, 16, 16, 32, 1),
    (32, False, 4): Tile(16, 16, 16, 32, 1),
}
"""(padded heads, whether there are maps per query or key, bytes per element) -> tile, for an H100's shared memory."""


def fits(call: TalkingCall) -> bool:
    """Whether `TILES` has an entry for the call, so that one program can hold all heads; else use `talking_blocks`."""
    return _tile_key(call) in TILES


def attend_in_tiles(call: TalkingCall) -> torch.Tensor:
    """Return the outputs (B, T, heads, features)."""
    query, key, value = (x.contiguous() for x in (call.query, call.key, call.value))
    (batch, heads, queries, size), (groups, keys, features) = query.shape, value.shape[1:]
    counts = (heads, call.logits_map.shape[2], call.weights_map.shape[2])  # query heads, softmax heads, output heads
    output = value.new_empty(batch, queries, counts[2], features)
    stats = torch.empty(2, batch, counts[1], queries, dtype=torch.float32, device=query.device)
    (spans, mask, *mask_strides, mask_heads), kind = _mask_arguments(call)
    first, second = _Maps(call.logits_map, call.logits_key_map), _Maps(call.weights_map, call.weights_key_map)
    tile, padded = TILES[_tile_key(call)], [padded_size(count) for count in counts]
    narrow, wide = min(tile.features, padded_size(size)), min(tile.outputs, padded_size(features))
    shared = (queries, keys, batch * mask_heads * queries, call.scaling, mask_heads, heads, groups, counts[1])
    flags = (kind, call.causal, OPERAND_DTYPES[query.dtype], product_precision(query.dtype))
    options = {"num_warps": 8, "num_stages": tile.stages}
    blocks = triton.cdiv(queries, tile.queries)
    tensors: tuple[torch.Tensor, ...] = (query, key, *first.tensors, mask, spans, stats)
    sizes: tuple[int, ...] = (size, *padded[:2], tile.queries, tile.keys, narrow)
    softmax_stats[blocks, batch](
        *tensors, *first.strides, *mask_strides, *shared, *sizes, *first.per_token, *flags, **options
    )
    tensors = (query, key, value, output, *first.tensors, *second.tensors, mask, spans, stats)
    strides = (*first.strides, *second.strides, *mask_strides)
    sizes = (counts[2], size, features, *padded, tile.queries, tile.keys, narrow, wide)
    weighted_values[blocks, batch, triton.cdiv(features, wide)](
        *tensors, *strides, *shared, *sizes, *first.per_token, *second.per_token, *flags, **options
    )
    return output


class _Maps:
    """The maps across heads of one stage (logits or weights), as kernel arguments."""

    def __init__(self, maps: torch.Tensor, key_maps: torch.Tensor | None) -> None:
        maps = maps.contiguous()
        self.tensors = (maps, maps if key_maps is None else key_maps.contiguous())
        shape, strides = maps.shape, maps.stride()
        self.strides = tuple(0 if shape[i] == 1 else strides[i] for i in (0, 1))
        """Strides of the maps over sequences and over queries; 0 where all share one map."""
        self.per_token = (shape[1] > 1, key_maps is not None)
        """Whether there is one map per query, and one per key."""


def padded_size(size: int) -> int:
    """Return the size padded to a power of two, at least 16, as `tl.dot` requires."""
    return max(16, triton.next_power_of_2(size))


def _tile_key(call: TalkingCall) -> tuple[int, bool, int]:
    """Return the key of the call in `TILES`."""
    maps, key_maps = (call.logits_map, call.weights_map), (call.logits_key_map, call.weights_key_map)
    varies = any(x.shape[1] > 1 for x in maps) or any(x is not None for x in key_maps)
    return padded_size(call.heads()), varies, call.query.element_size()


def _mask_arguments(call: TalkingCall) -> tuple[tuple[Any, ...], int]:
    """Return (`key_spans` of the mask, mask, its strides, its heads) and its kind: 0 none, 1 boolean, 2 additive."""
    if call.mask is None:
        empty = torch.empty(0, dtype=torch.int32, device=call.query.device)
        return (empty, empty, 0, 0, 0, 0, 1), 0
    mask = call.mask.expand(call.query.shape[0], -1, call.query.shape[2], -1)
    is_boolean = mask.dtype == torch.bool
    visible = mask if is_boolean else mask > torch.finfo(mask.dtype).min
    return (key_spans(visible), mask, *mask.stride(), mask.shape[1]), 1 if is_boolean else 2


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
    """Return the outputs of `talking_blocks`, computed by Triton; the call must satisfy `fits`."""
    call = TalkingCall(
        query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal
    )
    with torch.cuda.device_of(query):  # kernels launch on the current device
        return attend_in_tiles(call)


talking_tiles.register_fake(talking_fake)
talking_tiles.register_autograd(talking_autograd, setup_context=talking_keep)


def talking_operator(*call: Any) -> torch.Tensor:
    """Call the Triton op if the call `fits`, else `talking_blocks`; both take the same arguments."""
    attend = talking_tiles if fits(TalkingCall(*call)) else talking_blocks
    return attend(*call)
