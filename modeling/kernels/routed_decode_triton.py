"""Decoding attention for `mixture` in Triton: one query token, split-K, without gradients.

The keys are split among programs, because the heads of one token are too few to occupy a GPU. Programs of unused heads
return at once, so the host never waits for the GPU to learn which heads are selected. One custom op for torch.compile.
"""

import torch

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
except ImportError:
    raise

from .decode_kernels_triton import decode_split, merge_splits
from .routed_triton import OPERAND_DTYPES
from .triton_support import product_precision

NAMESPACE = "crosshead_mixture_decode_triton"
KEYS_PER_PART, PARTS_PER_STEP = 512, 32
"""Number of keys per program, and of partial results that `merge_splits` reads per iteration; not tuned yet."""
TILE_BYTES = 2**14
"""Maximum bytes of a tile of keys; shared memory of an H100 holds several such tiles of keys and of values."""


def keys_per_tile(features: int, dtype: torch.dtype) -> int:
    """Return the number of keys per tile: 64, or fewer for large heads; at least 16, the minimum of `tl.dot`."""
    return max(16, min(64, TILE_BYTES // (features * dtype.itemsize)))


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def decode_selected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chosen: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Return outputs (B, 1, H, d) of one query token (B, H, 1, d) over keys and values (B, G, S, d).

    `chosen` (B, 1, H) selects query heads, `mask` (B or 1, 1, S) is True for visible keys. A key/value head is skipped
    and its outputs are zero if none of its query heads is selected; otherwise all its query heads are computed.
    """
    (batch, heads, _, features), (_, groups, keys, value_features) = query.shape, value.shape
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    group_size, parts = heads // groups, triton.cdiv(keys, KEYS_PER_PART)
    rows, *padded = (max(16, triton.next_power_of_2(size)) for size in (group_size, features, value_features))
    output = value.new_zeros(batch, 1, heads, value_features)
    stats = torch.empty(batch * groups, parts, 2, group_size, dtype=torch.float32, device=value.device)
    partial = torch.empty(batch * groups, parts, group_size, value_features, dtype=torch.float32, device=value.device)
    chosen, mask_ptr = chosen.contiguous(), chosen if mask is None else mask.expand(batch, -1, -1)
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], mask_ptr.stride(0), mask_ptr.stride(2))
    sizes = (group_size, features, value_features, rows, *padded)
    formats = OPERAND_DTYPES[query.dtype], product_precision(query.dtype)
    with torch.cuda.device_of(query):  # kernels launch on the current device
        decode_split[(parts, batch * groups)](
            *(query, key, value, chosen, mask_ptr, stats, partial, *strides, keys, groups, scaling, mask is not None),
            *(*sizes, keys_per_tile(max(padded), key.dtype), KEYS_PER_PART, *formats),
        )
        join_sizes = (group_size, value_features, rows, padded[1], PARTS_PER_STEP)
        merge_splits[(batch * groups, group_size)](chosen, stats, partial, output, parts, *join_sizes)
    return output


@decode_selected.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return value.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])
