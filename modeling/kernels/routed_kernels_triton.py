"""Triton kernels of `routed_triton`: flash attention of the selected queries of each head.

`list_tokens` compacts the selected tokens of each head into a list. In `attend`, one program computes a tile of M
listed queries of one head: first over key blocks that all its queries see completely, without a mask, then over the
masked blocks at the edges. Key blocks that none of its queries sees are skipped. Softmax uses base 2: `exp2`, with
log2(e) folded into the scale.

B sequences, H query heads, G key/value heads, T tokens, S keys, D features of queries and keys, DV of values; BD and
BDV are D and DV padded to powers of two. M queries and N keys per tile. Strides of query (q), key (k), value (v) and
mask (m): `*_b` over sequences, `*_h` over heads, `*_t` over tokens, `*_s` over keys. `spans` is `seen_keys` of the
mask, `total` = B * T its stride over the three numbers. `tokens` (B, H, T) and `places` (B, H, T + 1) are the outputs
of `list_tokens`. MASKED: there is a mask. DOT: dtype of the matmul operands.
"""

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from .visible_triton import keys_of


@triton.jit
def list_tokens(
    chosen: tl.tensor, spans: tl.tensor, tokens: tl.tensor, places: tl.tensor, T: int, H: int, total: int,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per head, the selected tokens that see a key (B, H, T), and how many precede each token (B, H, T + 1)."""
    pair = tl.program_id(0)
    batch, head = pair // H, pair % H
    found = pair * 0
    for start in range(0, T, BLOCK):
        token = start + tl.arange(0, BLOCK)
        row, real = batch * T + token, token < T
        taken = tl.load(chosen + row.to(tl.int64) * H + head, mask=real, other=0).to(tl.int32)
        if MASKED:
            taken *= (tl.load(spans + 2 * total + row, mask=real, other=0) > 0).to(tl.int32)
        place = found + tl.cumsum(taken, 0) - taken
        tl.store(places + pair * (T + 1) + token, place, mask=real)
        tl.store(tokens + pair * T + place, token, mask=taken > 0)
        found += tl.sum(taken, 0)
    tl.store(places + pair * (T + 1) + T, found)


@triton.jit
def attend(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, output: tl.tensor, norms: tl.tensor,
    tokens: tl.tensor, places: tl.tensor, spans: tl.tensor, mask: tl.tensor,
    q_b: int, q_h: int, q_t: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int, m_b: int, m_t: int,
    T: int, S: int, H: int, G: int, total: int, scaling: float, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store the outputs (B, T, H, DV), and the base-2 log-sum-exp of the listed queries, in list order (B, H, T)."""
    pair = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    count, block = tl.load(places + pair * (T + 1) + T), (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if block >= count:
        return
    place = block + tl.arange(0, M)
    token = tl.load(tokens + pair * T + tl.minimum(place, count - 1))  # padding rows repeat the last token
    first, end, whole = keys_of(spans, batch * T + token, token, total, S, MASKED, CAUSAL)
    q = rows_of(query + batch * q_b + head * q_h, token, q_t, T, D, BD, False).to(DOT)
    key += batch * k_b + head // (H // G) * k_h
    value += batch * v_b + head // (H // G) * v_h
    best, sums, outputs = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, BDV], tl.float32)
    low, start, stop, high = stretches(first, end, whole, N)
    for edge in tl.static_range(2):
        for step in range(blocks_of(low, start, stop, high, N, edge)):
            keys = keys_at(step, low, start, stop, N, edge)
            k, v = rows_of(key, keys, k_s, S, D, BD, edge).to(DOT), rows_of(value, keys, v_s, S, DV, BDV, edge).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * 1.4426950408889634)
            if edge:
                at = mask + batch * m_b + token.to(tl.int64)[:, None] * m_t + keys[None, :]
                seen = visible(at, first[:, None], end[:, None], whole[:, None], keys[None, :], MASKED)
                scores = tl.where(seen, scores, -float("inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            weights, shrink = tl.exp2(scores - better[:, None]), tl.exp2(best - better)
            best, sums = better, sums * shrink + tl.sum(weights, 1)
            outputs = tl.dot(weights.to(DOT), v, outputs * shrink[:, None], input_precision=PRECISION)
    put_rows(output, (batch * T + token) * H + head, outputs / sums[:, None], place < count, DV, BDV)
    tl.store(norms + pair * T + place, best + tl.log2(sums), mask=place < count)


@triton.jit
def stretches(
    first: tl.tensor, end: tl.tensor, whole: tl.tensor, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return (low, start, stop, high): no query of a tile sees keys outside [low, high), all see [start, stop).

    All but `high` are multiples of N. Key blocks outside [start, stop) are the edge, where the mask applies.
    """
    low, high = tl.min(first) // N * N, tl.max(end)
    start, stop = tl.cdiv(tl.max(first), N) * N, tl.min(end) // N * N
    common = (tl.min(whole.to(tl.int32)) > 0) & (start < stop)
    return low, tl.where(common, start, low), tl.where(common, stop, low), high


@triton.jit
def blocks_of(
    low: tl.tensor, start: tl.tensor, stop: tl.tensor, high: tl.tensor, N: tl.constexpr, edge: tl.constexpr
) -> tl.tensor:
    """Return the number of blocks of N keys in [start, stop), or in the edge around it."""
    if edge:
        return (start - low) // N + tl.cdiv(high - stop, N)
    else:
        return (stop - start) // N


@triton.jit
def keys_at(
    step: tl.tensor, low: tl.tensor, start: tl.tensor, stop: tl.tensor, N: tl.constexpr, edge: tl.constexpr
) -> tl.tensor:
    """Return the N key indices of block `step` in [start, stop), or in the edge around it."""
    at = start + step * N
    if edge:
        before = (start - low) // N
        at = tl.where(step < before, low + step * N, stop + (step - before) * N)
    return at + tl.arange(0, N)


@triton.jit
def visible(
    at: tl.tensor, first: tl.tensor, end: tl.tensor, whole: tl.tensor, keys: tl.tensor, MASKED: tl.constexpr
) -> tl.tensor:
    """Return True where a key is visible; the mask is read, at the pointers `at`, only where a key range has gaps."""
    seen = (keys >= first) & (keys < end)
    if MASKED:
        unsure = seen & (whole == 0)
        seen = (seen & whole) | (tl.load(at, mask=unsure, other=0) & unsure)
    return seen


@triton.jit
def rows_of(
    at: tl.tensor, row: tl.tensor, stride: int, rows: int, D: tl.constexpr, BD: tl.constexpr, edge: tl.constexpr
) -> tl.tensor:
    """Load rows of D features, padded to BD with zeros; at an edge, rows from `rows` on are zero too."""
    feature = tl.arange(0, BD)[None, :]
    real = feature < D
    if edge:
        real = real & (row < rows)[:, None]
    return tl.load(at + row.to(tl.int64)[:, None] * stride + feature, mask=real, other=0.0)


@triton.jit
def put_rows(at: tl.tensor, row: tl.tensor, x: tl.tensor, real: tl.tensor, D: tl.constexpr, BD: tl.constexpr) -> None:
    """Store the rows of `x` (rows, BD) where `real`, as rows of D features of a contiguous tensor."""
    feature = tl.arange(0, BD)[None, :]
    at += row.to(tl.int64)[:, None] * D + feature
    tl.store(at, x.to(at.dtype.element_ty), mask=real[:, None] & (feature < D))
