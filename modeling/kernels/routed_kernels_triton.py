"""Triton kernels of `routed_triton`: flash attention of the selected queries of each head.

`list_tokens` compacts the selected tokens of each head into a list. In `attend`, one program computes a tile of M
listed queries of one head: first over key blocks that all its queries see completely, without a mask, then over the
masked blocks at the edges. Key blocks that none of its queries sees are skipped. Softmax uses base 2: `exp2`, with
log2(e) folded into the scale.

B sequences, H query heads, G key/value heads, T tokens, S keys, D features of queries and keys, DV of values; BD and
BDV are D and DV padded to powers of two. M queries and N keys per tile. Strides of query (q), key (k), value (v) and
mask (m): `*_b` over sequences, `*_h` over heads, `*_t` over tokens, `*_s` over keys. `spans` is `key_spans` of the
mask, `total` = B * T its stride over the three numbers. `tokens` (B, H, T) and `offsets` (B, H, T + 1) are the outputs
of `list_tokens`. MASKED: there is a mask. DOT: dtype of the matmul operands.
"""

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from .key_spans_triton import load_spans


@triton.jit
def list_tokens(
    chosen: tl.tensor, spans: tl.tensor, tokens: tl.tensor, offsets: tl.tensor, T: int, H: int, total: int,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per head, the selected tokens that see a key (B, H, T), and how many precede each token (B, H, T + 1)."""
    pair = tl.program_id(0)
    batch, head = pair // H, pair % H
    count = pair * 0
    for start in range(0, T, BLOCK):
        token = start + tl.arange(0, BLOCK)
        row, valid = batch * T + token, token < T
        selected = tl.load(chosen + row.to(tl.int64) * H + head, mask=valid, other=0).to(tl.int32)
        if MASKED:
            selected *= (tl.load(spans + 2 * total + row, mask=valid, other=0) > 0).to(tl.int32)
        position = count + tl.cumsum(selected, 0) - selected
        tl.store(offsets + pair * (T + 1) + token, position, mask=valid)
        tl.store(tokens + pair * T + position, token, mask=selected > 0)
        count += tl.sum(selected, 0)
    tl.store(offsets + pair * (T + 1) + T, count)


@triton.jit
def attend(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, output: tl.tensor, lse: tl.tensor,
    tokens: tl.tensor, offsets: tl.tensor, spans: tl.tensor, mask: tl.tensor,
    q_b: int, q_h: int, q_t: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int, m_b: int, m_t: int,
    T: int, S: int, H: int, G: int, total: int, scaling: float, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store the outputs (B, T, H, DV), and the base-2 log-sum-exp of the listed queries, in list order (B, H, T)."""
    pair = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    count, block = tl.load(offsets + pair * (T + 1) + T), (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if block >= count:
        return
    position = block + tl.arange(0, M)
    token = tl.load(tokens + pair * T + tl.minimum(position, count - 1))  # padding rows repeat the last token
    first, end, contiguous = load_spans(spans, batch * T + token, token, total, S, MASKED, CAUSAL)
    q = load_rows(query + batch * q_b + head * q_h, token, q_t, T, D, BD, False).to(DOT)
    key += batch * k_b + head // (H // G) * k_h
    value += batch * v_b + head // (H // G) * v_h
    row_max, row_sum, acc = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BDV], tl.float32)
    low, start, stop, high = key_bounds(first, end, contiguous, N)
    for edge in tl.static_range(2):
        for step in range(block_count(low, start, stop, high, N, edge)):
            keys = block_keys(step, low, start, stop, N, edge)
            k, v = (
                load_rows(key, keys, k_s, S, D, BD, edge).to(DOT),
                load_rows(value, keys, v_s, S, DV, BDV, edge).to(DOT),
            )
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * 1.4426950408889634)
            if edge:
                ptr = mask + batch * m_b + token.to(tl.int64)[:, None] * m_t + keys[None, :]
                visible = visible_keys(ptr, first[:, None], end[:, None], contiguous[:, None], keys[None, :], MASKED)
                scores = tl.where(visible, scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights, rescale = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
            row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(DOT), v, acc * rescale[:, None], input_precision=PRECISION)
    store_rows(output, (batch * T + token) * H + head, acc / row_sum[:, None], position < count, DV, BDV)
    tl.store(lse + pair * T + position, row_max + tl.log2(row_sum), mask=position < count)


@triton.jit
def key_bounds(
    first: tl.tensor, end: tl.tensor, contiguous: tl.tensor, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (low, start, stop, high): no query of a tile sees keys outside [low, high), all see [start, stop).

    All but `high` are multiples of N. Key blocks outside [start, stop) are the edge, where the mask applies.
    """
    low, high = tl.min(first) // N * N, tl.max(end)
    start, stop = tl.cdiv(tl.max(first), N) * N, tl.min(end) // N * N
    common = (tl.min(contiguous.to(tl.int32)) > 0) & (start < stop)
    return low, tl.where(common, start, low), tl.where(common, stop, low), high


@triton.jit
def block_count(
    low: tl.tensor, start: tl.tensor, stop: tl.tensor, high: tl.tensor, N: tl.constexpr, edge: tl.constexpr
) -> tl.tensor:
    """Return the number of blocks of N keys in [start, stop), or in the edge around it."""
    if edge:
        return (start - low) // N + tl.cdiv(high - stop, N)
    else:
        return (stop - start) // N


@triton.jit
def block_keys(
    step: tl.tensor, low: tl.tensor, start: tl.tensor, stop: tl.tensor, N: tl.constexpr, edge: tl.constexpr
) -> tl.tensor:
    """Return the N key indices of block `step` in [start, stop), or in the edge around it."""
    first = start + step * N
    if edge:
        before = (start - low) // N
        first = tl.where(step < before, low + step * N, stop + (step - before) * N)
    return first + tl.arange(0, N)


@triton.jit
def visible_keys(
    ptr: tl.tensor, first: tl.tensor, end: tl.tensor, contiguous: tl.tensor, keys: tl.tensor, MASKED: tl.constexpr
) -> tl.tensor:
    """Return True where a key is visible; the mask is read, at the pointers `ptr`, only where a key range has gaps."""
    visible = (keys >= first) & (keys < end)
    if MASKED:
        from_mask = visible & (contiguous == 0)
        visible = (visible & contiguous) | (tl.load(ptr, mask=from_mask, other=0) & from_mask)
    return visible


@triton.jit
def load_rows(
    ptr: tl.tensor, row: tl.tensor, stride: int, rows: int, D: tl.constexpr, BD: tl.constexpr, edge: tl.constexpr
) -> tl.tensor:
    """Load rows of D features, padded to BD with zeros; at an edge, rows from `rows` on are zero too."""
    feature = tl.arange(0, BD)[None, :]
    valid = feature < D
    if edge:
        valid = valid & (row < rows)[:, None]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + feature, mask=valid, other=0.0)


@triton.jit
def store_rows(
    ptr: tl.tensor, row: tl.tensor, x: tl.tensor, valid: tl.tensor, D: tl.constexpr, BD: tl.constexpr
) -> None:
    """Store the rows of `x` (rows, BD) where `valid`, as rows of D features of a contiguous tensor."""
    feature = tl.arange(0, BD)[None, :]
    ptr += row.to(tl.int64)[:, None] * D + feature
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=valid[:, None] & (feature < D))
