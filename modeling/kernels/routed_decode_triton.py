"""Decoding under a mixture on a GPU, by Triton.

The keys are divided among programs, as one token has too few heads to keep a GPU busy. Nothing waits for the GPU to
say which heads are needed, and to `torch.compile` the whole is one operator. It has no gradients.
"""

import torch

try:  # what looks through this file for packages that it must have passes over a `try`
    import triton
except ImportError:
    raise

from .decode_kernels_triton import attend_to_part, join_parts
from .routed_triton import FACTORS
from .where_triton_runs import product_precision

NAMESPACE = "crosshead_mixture_decode_triton"
PART, PARTS = 512, 32
"""Keys of one program, and so many of such parts are joined at a time; guesses that await measuring."""
AT_ONCE = 2**14
"""Bytes of those that it meets at a time; an H100's fast memory holds several times that of each keys and values."""


def keys_at_once(features: int, dtype: torch.dtype) -> int:
    """From 16, the least that products are made of, to 64."""
    return max(16, min(64, AT_ONCE // (features * dtype.itemsize)))


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def attend_to_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chosen: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Outputs (B, 1, H, d) of one query for each head (B, H, 1, d), zeros of heads left unread.

    `chosen` (B, 1, H) says which queries count, `mask` (B or 1, 1, S) which keys they see.
    """
    (batch, heads, _, features), (_, groups, keys, of_value) = query.shape, value.shape
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    readers, parts = heads // groups, triton.cdiv(keys, PART)
    rows, *padded = (max(16, triton.next_power_of_2(size)) for size in (readers, features, of_value))
    output = value.new_zeros(batch, 1, heads, of_value)
    sums = torch.empty(batch * groups, parts, 2, readers, dtype=torch.float32, device=value.device)
    found = torch.empty(batch * groups, parts, readers, of_value, dtype=torch.float32, device=value.device)
    chosen, seen = chosen.contiguous(), chosen if mask is None else mask.expand(batch, -1, -1)
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], seen.stride(0), seen.stride(2))
    sizes = (readers, features, of_value, rows, *padded)
    formats = FACTORS[query.dtype], product_precision(query.dtype)
    with torch.cuda.device_of(query):  # on which kernels start, whichever is the current one
        attend_to_part[(parts, batch * groups)](
            *(query, key, value, chosen, seen, sums, found, *strides, keys, groups, scaling, mask is not None),
            *(*sizes, keys_at_once(max(padded), key.dtype), PART, *formats),
        )
        of_join = (readers, of_value, rows, padded[1], PARTS)
        join_parts[(batch * groups, readers)](chosen, sums, found, output, parts, *of_join)
    return output


@attend_to_chosen.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return value.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])
