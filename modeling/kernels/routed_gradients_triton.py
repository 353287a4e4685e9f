"""Triton kernels of `routed_triton`: the backward pass, which recomputes the softmax weights from log-sum-exp.

`query_gradients`: one program per tile of selected queries of one head, as in the forward pass; it also stores
delta = rowsum(dO * O). `key_gradients` runs after it: one program per tile of keys of one key/value head, which loops
over the selected queries of the H / G query heads that share it. Symbols are those of `routed_kernels_triton`.
"""

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from .routed_kernels_triton import blocks_of, keys_at, put_rows, rows_of, stretches, visible
from .visible_triton import keys_of


@triton.jit
def query_gradients(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, output: tl.tensor,
    norms: tl.tensor, given: tl.tensor, shifts: tl.tensor, to_query: tl.tensor,
    tokens: tl.tensor, places: tl.tensor, spans: tl.tensor, mask: tl.tensor,
    q_b: int, q_h: int, q_t: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int, m_b: int, m_t: int,
    T: int, S: int, H: int, G: int, total: int, scaling: float, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dQ (B, T, H, D), and delta = rowsum(dO * O) of the listed queries, (B, H, T), for `key_gradients`."""
    pair = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    count, block = tl.load(places + pair * (T + 1) + T), (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if block >= count:
        return
    place = block + tl.arange(0, M)
    listed = pair * T + tl.minimum(place, count - 1)
    token, norm = tl.load(tokens + listed), tl.load(norms + listed)
    first, end, whole = keys_of(spans, batch * T + token, token, total, S, MASKED, CAUSAL)
    row = (batch * T + token) * H + head
    q = rows_of(query + batch * q_b + head * q_h, token, q_t, T, D, BD, False).to(DOT)
    grad = rows_of(given, row, DV, 0, DV, BDV, False)
    shift = tl.sum(grad.to(tl.float32) * rows_of(output, row, DV, 0, DV, BDV, False).to(tl.float32), 1)
    tl.store(shifts + pair * T + place, shift, mask=place < count)
    grad, found = grad.to(DOT), tl.zeros([M, BD], tl.float32)
    key += batch * k_b + head // (H // G) * k_h
    value += batch * v_b + head // (H // G) * v_h
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
            to_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            to_scores = tl.exp2(scores - norm[:, None]) * (to_weights - shift[:, None])
            found = tl.dot(to_scores.to(DOT), k, found, input_precision=PRECISION)
    put_rows(to_query, row, found * scaling, place < count, D, BD)


@triton.jit
def key_gradients(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, norms: tl.tensor,
    given: tl.tensor, shifts: tl.tensor, to_key: tl.tensor, to_value: tl.tensor,
    tokens: tl.tensor, places: tl.tensor, spans: tl.tensor, mask: tl.tensor,
    q_b: int, q_h: int, q_t: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int, m_b: int, m_t: int,
    T: int, S: int, H: int, G: int, total: int, scaling: float, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store dK (B, G, S, D) and dV (B, G, S, DV), summed over the query heads of each key/value head."""
    group, at = tl.program_id(1), tl.program_id(0) * N
    batch, keys = (group // G).to(tl.int64), at + tl.arange(0, N)
    k = rows_of(key + batch * k_b + (group % G).to(tl.int64) * k_h, keys, k_s, S, D, BD, True).to(DOT)
    v = rows_of(value + batch * v_b + (group % G).to(tl.int64) * v_h, keys, v_s, S, DV, BDV, True).to(DOT)
    to_k, to_v = tl.zeros([N, BD], tl.float32), tl.zeros([N, BDV], tl.float32)
    some, all_of, end_of = _readers(spans + batch * T, at, tl.minimum(at + N, S), T, total, MASKED, CAUSAL, BLOCK)
    for member in range(H // G):
        head = group % G * (H // G) + member
        pair = batch * H + head
        of_head = places + pair * (T + 1)
        start, middle, stop = tl.load(of_head + some), tl.load(of_head + all_of), tl.load(of_head + end_of)
        for edge in tl.static_range(2):
            limit = middle if edge else stop
            for block in range(start if edge else middle, limit, M):
                place = block + tl.arange(0, M)
                listed = pair * T + tl.minimum(place, limit - 1)
                token, norm = tl.load(tokens + listed), tl.load(norms + listed)
                shift = tl.load(shifts + listed)
                q = rows_of(query + batch * q_b + head.to(tl.int64) * q_h, token, q_t, T, D, BD, False).to(DOT)
                grad = rows_of(given, (batch * T + token) * H + head, DV, 0, DV, BDV, False).to(DOT)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scaling * 1.4426950408889634)
                seen = (place < limit)[None, :]
                if edge:
                    first, end, whole = keys_of(spans, batch * T + token, token, total, S, MASKED, CAUSAL)
                    of_mask = mask + batch * m_b + token.to(tl.int64)[None, :] * m_t + keys[:, None]
                    seen &= visible(of_mask, first[None, :], end[None, :], whole[None, :], keys[:, None], MASKED)
                weights = tl.exp2(tl.where(seen, scores, -float("inf")) - norm[None, :])
                to_v = tl.dot(weights.to(DOT), grad, to_v, input_precision=PRECISION)
                to_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                to_k = tl.dot((weights * (to_weights - shift[None, :])).to(DOT), q, to_k, input_precision=PRECISION)
    put_rows(to_key, group * S + keys, to_k * scaling, keys < S, D, BD)
    put_rows(to_value, group * S + keys, to_v, keys < S, DV, BDV)


@triton.jit
def _readers(
    spans: tl.tensor, at: tl.tensor, end_at: tl.tensor, T: int, total: int,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return three token bounds for the tile of keys [at, end_at): only tokens in [first, third) see any of its keys.

    Tokens in [second, third) see the whole tile. With a mask, the second is the third: all tokens need the mask.
    """
    if MASKED:
        some, end_of = at * 0 + T, at * 0
        for start in range(0, T, BLOCK):
            token = start + tl.arange(0, BLOCK)
            first = tl.load(spans + token, mask=token < T, other=0)
            end = tl.load(spans + total + token, mask=token < T, other=0)
            sees = (first < end_at) & (end > at)
            some = tl.minimum(some, tl.min(tl.where(sees, token, T), 0))
            end_of = tl.maximum(end_of, tl.max(tl.where(sees, token + 1, 0), 0))
        return some, end_of, end_of
    elif CAUSAL:
        some = tl.minimum(at, T)
        return some, tl.maximum(some, tl.minimum(end_at - 1, T)), at * 0 + T
    else:
        return at * 0, at * 0, at * 0 + T
