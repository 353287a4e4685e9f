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

from .key_spans_triton import load_spans
from .routed_kernels_triton import block_count, block_keys, key_bounds, load_rows, store_rows, visible_keys


@triton.jit
def query_gradients(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, output: tl.tensor,
    lse: tl.tensor, grad_output: tl.tensor, deltas: tl.tensor, grad_query: tl.tensor,
    tokens: tl.tensor, offsets: tl.tensor, spans: tl.tensor, mask: tl.tensor,
    q_b: int, q_h: int, q_t: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int, m_b: int, m_t: int,
    T: int, S: int, H: int, G: int, total: int, scaling: float, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store dQ (B, T, H, D), and delta = rowsum(dO * O) of the listed queries, (B, H, T), for `key_gradients`."""
    pair = tl.program_id(1)
    batch, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    count, block = tl.load(offsets + pair * (T + 1) + T), (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if block >= count:
        return
    position = block + tl.arange(0, M)
    entry = pair * T + tl.minimum(position, count - 1)
    token, row_lse = tl.load(tokens + entry), tl.load(lse + entry)
    first, end, contiguous = load_spans(spans, batch * T + token, token, total, S, MASKED, CAUSAL)
    row = (batch * T + token) * H + head
    q = load_rows(query + batch * q_b + head * q_h, token, q_t, T, D, BD, False).to(DOT)
    grad = load_rows(grad_output, row, DV, 0, DV, BDV, False)
    delta = tl.sum(grad.to(tl.float32) * load_rows(output, row, DV, 0, DV, BDV, False).to(tl.float32), 1)
    tl.store(deltas + pair * T + position, delta, mask=position < count)
    grad, dq = grad.to(DOT), tl.zeros([M, BD], tl.float32)
    key += batch * k_b + head // (H // G) * k_h
    value += batch * v_b + head // (H // G) * v_h
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
            grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            grad_scores = tl.exp2(scores - row_lse[:, None]) * (grad_weights - delta[:, None])
            dq = tl.dot(grad_scores.to(DOT), k, dq, input_precision=PRECISION)
    store_rows(grad_query, row, dq * scaling, position < count, D, BD)


@triton.jit
def key_gradients(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, lse: tl.tensor,
    grad_output: tl.tensor, deltas: tl.tensor, grad_key: tl.tensor, grad_value: tl.tensor,
    tokens: tl.tensor, offsets: tl.tensor, spans: tl.tensor, mask: tl.tensor,
    q_b: int, q_h: int, q_t: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int, m_b: int, m_t: int,
    T: int, S: int, H: int, G: int, total: int, scaling: float, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store dK (B, G, S, D) and dV (B, G, S, DV), summed over the query heads of each key/value head."""
    group, key_start = tl.program_id(1), tl.program_id(0) * N
    batch, keys = (group // G).to(tl.int64), key_start + tl.arange(0, N)
    k = load_rows(key + batch * k_b + (group % G).to(tl.int64) * k_h, keys, k_s, S, D, BD, True).to(DOT)
    v = load_rows(value + batch * v_b + (group % G).to(tl.int64) * v_h, keys, v_s, S, DV, BDV, True).to(DOT)
    dk, dv = tl.zeros([N, BD], tl.float32), tl.zeros([N, BDV], tl.float32)
    low, full, high = _token_bounds(
        spans + batch * T, key_start, tl.minimum(key_start + N, S), T, total, MASKED, CAUSAL, BLOCK
    )
    for member in range(H // G):
        head = group % G * (H // G) + member
        pair = batch * H + head
        head_offsets = offsets + pair * (T + 1)
        start, middle, stop = tl.load(head_offsets + low), tl.load(head_offsets + full), tl.load(head_offsets + high)
        for edge in tl.static_range(2):
            limit = middle if edge else stop
            for block in range(start if edge else middle, limit, M):
                position = block + tl.arange(0, M)
                entry = pair * T + tl.minimum(position, limit - 1)
                token, row_lse = tl.load(tokens + entry), tl.load(lse + entry)
                delta = tl.load(deltas + entry)
                q = load_rows(query + batch * q_b + head.to(tl.int64) * q_h, token, q_t, T, D, BD, False).to(DOT)
                grad = load_rows(grad_output, (batch * T + token) * H + head, DV, 0, DV, BDV, False).to(DOT)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scaling * 1.4426950408889634)
                visible = (position < limit)[None, :]
                if edge:
                    first, end, contiguous = load_spans(spans, batch * T + token, token, total, S, MASKED, CAUSAL)
                    ptr = mask + batch * m_b + token.to(tl.int64)[None, :] * m_t + keys[:, None]
                    visible &= visible_keys(
                        ptr, first[None, :], end[None, :], contiguous[None, :], keys[:, None], MASKED
                    )
                weights = tl.exp2(tl.where(visible, scores, -float("inf")) - row_lse[None, :])
                dv = tl.dot(weights.to(DOT), grad, dv, input_precision=PRECISION)
                grad_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                dk = tl.dot((weights * (grad_weights - delta[None, :])).to(DOT), q, dk, input_precision=PRECISION)
    store_rows(grad_key, group * S + keys, dk * scaling, keys < S, D, BD)
    store_rows(grad_value, group * S + keys, dv, keys < S, DV, BDV)


@triton.jit
def _token_bounds(
    spans: tl.tensor, key_start: tl.tensor, key_end: tl.tensor, T: int, total: int,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return three token bounds for the tile [key_start, key_end): only tokens in [first, third) see any of its keys.

    Tokens in [second, third) see the whole tile. With a mask, the second is the third: all tokens need the mask.
    """
    if MASKED:
        low, high = key_start * 0 + T, key_start * 0
        for start in range(0, T, BLOCK):
            token = start + tl.arange(0, BLOCK)
            first = tl.load(spans + token, mask=token < T, other=0)
            end = tl.load(spans + total + token, mask=token < T, other=0)
            sees = (first < key_end) & (end > key_start)
            low = tl.minimum(low, tl.min(tl.where(sees, token, T), 0))
            high = tl.maximum(high, tl.max(tl.where(sees, token + 1, 0), 0))
        return low, high, high
    elif CAUSAL:
        low = tl.minimum(key_start, T)
        return low, tl.maximum(low, tl.minimum(key_end - 1, T)), key_start * 0 + T
    else:
        return key_start * 0, key_start * 0, key_start * 0 + T
