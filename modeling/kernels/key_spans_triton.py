"""Triton kernel that summarises a boolean mask per query: first visible key, one past the last, number of keys.

Attention masks nearly always show each query one contiguous range of keys (causal, padding, packing, sliding window).
Then the summary describes the row completely, and the attention kernels do not read the mask itself.
"""

import torch

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

ROWS, KEYS = 16, 128
"""Tile of the mask that one program reads per iteration."""


def key_spans(mask: torch.Tensor) -> torch.Tensor:
    """Return (3, B, heads, T) from a mask (B, heads, T, S): first visible key, one past the last, number of them."""
    batch, heads, queries, keys = mask.shape
    spans = torch.empty(3, batch, heads, queries, dtype=torch.int32, device=mask.device)
    grid = (triton.cdiv(queries, ROWS), batch * heads)
    _look[grid](mask, spans, *mask.stride(), heads, queries, keys, batch * heads * queries, ROWS, KEYS)
    return spans


@triton.jit
def _look(
    mask: tl.tensor, spans: tl.tensor, m_b: int, m_h: int, m_t: int, m_s: int, H: int, T: int, S: int, total: int,
    R: tl.constexpr, K: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per query, the first visible key (S if none), one past the last (0 if none), and their number."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    ptr = mask + batch * m_b + head * m_h + row.to(tl.int64)[:, None] * m_t
    first, end, count = tl.full([R], S, tl.int32), tl.zeros([R], tl.int32), tl.zeros([R], tl.int32)
    for start in range(0, S, K):
        key = start + tl.arange(0, K)[None, :]
        visible = tl.load(ptr + key.to(tl.int64) * m_s, mask=(row < T)[:, None] & (key < S), other=0).to(tl.int32)
        first = tl.minimum(first, tl.min(tl.where(visible > 0, key, S), 1))
        end = tl.maximum(end, tl.max(visible * (key + 1), 1))
        count += tl.sum(visible, 1)
    ptr = spans + tl.program_id(1) * T + row
    tl.store(ptr, first, mask=row < T)
    tl.store(ptr + total, end, mask=row < T)
    tl.store(ptr + 2 * total, count, mask=row < T)


@triton.jit
def load_spans(
    spans: tl.tensor, row: tl.tensor, token: tl.tensor, total: int, S: int, MASKED: tl.constexpr, CAUSAL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load each query's key range [first, end), and whether it sees every key in it, from `row` of `key_spans`."""
    if MASKED:
        first, end = tl.load(spans + row), tl.load(spans + total + row)
        contiguous = tl.load(spans + 2 * total + row) == end - first
    else:
        first = token * 0
        end = tl.minimum(token + 1, S) if CAUSAL else first + S
        contiguous = first == 0
    return first, end, contiguous
