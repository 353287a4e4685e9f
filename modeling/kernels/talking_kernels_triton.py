"""Triton kernels of `talking_triton`: one program holds all heads of a tile of queries and keys.

The second map mixes normalised weights of several heads, so an online softmax is impossible: there are two passes over
the keys. `softmax_stats` stores the row max and the reciprocal row sum of each softmax head; `weighted_values`
recomputes the logits, applies softmax and the second map, and multiplies by the values. Tiles are (heads, queries,
keys); the maps are padded with zeros.

B sequences, T tokens, S keys, D features of queries and keys, DV of values. Heads: H of queries, G of keys and values,
HS of the softmax (after the first map), HV of the outputs (after the second map), HM of the mask; PH, PS and PV are H,
HS and HV padded to powers of two. M queries and N keys per tile; BD features per `tl.dot`, BDV output features per
program. Strides of the first map (p), the second map (r) and the mask (m): `*_b` over sequences, `*_h` over heads,
`*_t` over tokens, `*_s` over keys. `spans` is `key_spans` of the mask, `total` its stride over the three numbers.
MASK: 0 without a mask, 1 boolean, 2 additive. PER_QUERY: one first map per query instead of one for all; PER_KEY: each
key adds a map. SECOND_PER_QUERY and SECOND_PER_KEY: the same for the second map.
"""

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from .key_spans_triton import load_spans
from .routed_kernels_triton import block_count, block_keys, key_bounds, visible_keys


@triton.jit
def softmax_stats(
    query: tl.tensor, key: tl.tensor, maps: tl.tensor, key_maps: tl.tensor, mask: tl.tensor, spans: tl.tensor,
    stats: tl.tensor, p_b: int, p_t: int, m_b: int, m_h: int, m_t: int, m_s: int, T: int, S: int, total: int,
    scaling: float, HM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr, D: tl.constexpr,
    PH: tl.constexpr, PS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per softmax head and query, the row max m and 1 / sum(exp(logit - m)): (2, B, HS, T)."""
    batch, head = tl.program_id(1).to(tl.int64), tl.arange(0, PS)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    valid_token, token = token < T, tl.minimum(token, T - 1)  # padding rows repeat the last token
    q_ptr, k_ptr, m_ptr = _pointers(query, key, mask, batch, token, m_b, m_h, m_t, T, S, HM, H, G, D, PH, PS)
    first_map = _load_map(maps + batch * p_b, token, p_t, HS, H, PS, PH, PER_QUERY)
    first, end, contiguous = _load_spans(spans, batch, token, T, S, total, HM, PS, MASK, CAUSAL)
    low, start, stop, high = key_bounds(first, end, contiguous, N)
    row_max, row_sum = tl.full([PS, M], -float("inf"), tl.float32), tl.zeros([PS, M], tl.float32)
    for edge in tl.static_range(2):
        for step in range(block_count(low, start, stop, high, N, edge)):
            keys = block_keys(step, low, start, stop, N, edge)
            logits = _products(q_ptr, k_ptr, keys, S, H, D, PH, M, N, BD, DOT, PRECISION) * scaling
            logits = _mix_heads(
                logits,
                first_map,
                key_maps + batch * S * HS * H,
                keys,
                S,
                HS,
                H,
                PS,
                PH,
                M,
                N,
                PER_QUERY,
                PER_KEY,
                PRECISION,
            )
            if edge:
                logits = _apply_mask(logits, m_ptr, m_s, first, end, contiguous, keys, S, MASK)
            new_max = tl.maximum(row_max, tl.max(logits, 2))
            row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(logits - new_max[:, :, None]), 2)
            row_max = new_max
    ptr = stats + (batch * HS + head)[:, None] * T + token[None, :]
    valid = (head < HS)[:, None] & valid_token[None, :]
    tl.store(ptr, row_max, mask=valid)
    tl.store(ptr + tl.num_programs(1).to(tl.int64) * HS * T, 1 / row_sum, mask=valid)


@triton.jit
def weighted_values(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, output: tl.tensor,
    maps: tl.tensor, key_maps: tl.tensor, second_maps: tl.tensor, second_key_maps: tl.tensor, mask: tl.tensor,
    spans: tl.tensor, stats: tl.tensor, p_b: int, p_t: int, r_b: int, r_t: int, m_b: int, m_h: int, m_t: int, m_s: int,
    T: int, S: int, total: int, scaling: float, HM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr,
    HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PH: tl.constexpr, PS: tl.constexpr, PV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PER_QUERY: tl.constexpr,
    PER_KEY: tl.constexpr, SECOND_PER_QUERY: tl.constexpr, SECOND_PER_KEY: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store BDV features of the outputs (B, T, HV, DV); the third grid axis covers DV."""
    batch, softmax_head = tl.program_id(1).to(tl.int64), tl.arange(0, PS)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    valid_token, token = token < T, tl.minimum(token, T - 1)
    q_ptr, k_ptr, m_ptr = _pointers(query, key, mask, batch, token, m_b, m_h, m_t, T, S, HM, H, G, D, PH, PS)
    first_map = _load_map(maps + batch * p_b, token, p_t, HS, H, PS, PH, PER_QUERY)
    second_map = _load_map(second_maps + batch * r_b, token, r_t, HV, HS, PV, PS, SECOND_PER_QUERY)
    first, end, contiguous = _load_spans(spans, batch, token, T, S, total, HM, PS, MASK, CAUSAL)
    low, start, stop, high = key_bounds(first, end, contiguous, N)
    stats += (batch * HS + softmax_head)[:, None] * T + token[None, :]
    row_max = tl.load(stats, mask=(softmax_head < HS)[:, None], other=0.0)[:, :, None]
    inverse_sum = tl.load(
        stats + tl.num_programs(1).to(tl.int64) * HS * T, mask=(softmax_head < HS)[:, None], other=0.0
    )[:, :, None]
    head, feature = tl.arange(0, PV), tl.program_id(2) * BDV + tl.arange(0, BDV)
    valid = (head < HV)[:, None, None] & (feature < DV)[None, None, :]
    v_ptr = value + ((batch * G + head // (HV // G)) * S * DV)[:, None, None] + feature[None, None, :]
    acc = tl.zeros([PV, M, BDV], tl.float32)
    for edge in tl.static_range(2):
        for step in range(block_count(low, start, stop, high, N, edge)):
            keys = block_keys(step, low, start, stop, N, edge)
            x = _products(q_ptr, k_ptr, keys, S, H, D, PH, M, N, BD, DOT, PRECISION) * scaling
            map_ptr = key_maps + batch * S * HS * H
            x = _mix_heads(x, first_map, map_ptr, keys, S, HS, H, PS, PH, M, N, PER_QUERY, PER_KEY, PRECISION)
            if edge:
                x = _apply_mask(x, m_ptr, m_s, first, end, contiguous, keys, S, MASK)
            x = tl.exp(x - row_max) * inverse_sum
            map_ptr = second_key_maps + batch * S * HV * HS
            x = _mix_heads(
                x, second_map, map_ptr, keys, S, HV, HS, PV, PS, M, N, SECOND_PER_QUERY, SECOND_PER_KEY, PRECISION
            )
            v = tl.load(
                v_ptr + keys.to(tl.int64)[None, :, None] * DV, mask=valid & (keys < S)[None, :, None], other=0.0
            )
            acc = tl.dot(x.to(DOT), v.to(DOT), acc, input_precision=PRECISION)
    row = ((batch * T + token)[None, :] * HV + head[:, None])[:, :, None]
    ptr = output + row * DV + feature[None, None, :]
    tl.store(ptr, acc.to(output.dtype.element_ty), mask=valid & valid_token[None, :, None])


@triton.jit
def _pointers(
    query: tl.tensor, key: tl.tensor, mask: tl.tensor, batch: tl.tensor, token: tl.tensor,
    m_b: int, m_h: int, m_t: int, T: int, S: int, HM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    PH: tl.constexpr, PS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return pointers to the queries (PH, M), to the first key of each head (PH), and to the mask rows (PS, M)."""
    head, mask_head, row = tl.arange(0, PH), tl.minimum(tl.arange(0, PS), HM - 1).to(tl.int64), token.to(tl.int64)
    q_ptr = query + (batch * H + head)[:, None] * T * D + row[None, :] * D
    k_ptr = key + (batch * G + head // (H // G)) * S * D
    return q_ptr, k_ptr, mask + batch * m_b + mask_head[:, None] * m_h + row[None, :] * m_t


@triton.jit
def _load_spans(
    spans: tl.tensor, batch: tl.tensor, token: tl.tensor, T: int, S: int, total: int,
    HM: tl.constexpr, PS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return `load_spans` per softmax head and query (PS, M): a row without visible keys gets the range of all keys.

    With an additive mask, no range counts as complete, so the mask is added to every block.
    """
    row = (batch * HM + tl.minimum(tl.arange(0, PS), HM - 1))[:, None] * T + token[None, :]
    first, end, contiguous = load_spans(spans, row, token[None, :], total, S, MASK > 0, CAUSAL)
    if MASK > 0:
        empty = end == 0
        first, end = tl.where(empty, 0, first), tl.where(empty, S, end)
        contiguous = contiguous & (MASK == 1)
    return first, end, contiguous


@triton.jit
def _load_map(
    maps: tl.tensor, token: tl.tensor, p_t: int, TO: tl.constexpr, FROM: tl.constexpr,
    PT: tl.constexpr, PF: tl.constexpr, PER_QUERY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the map from FROM to TO heads, padded: (PT, PF), or (M, PT, PF) with one map per query."""
    row, column = tl.arange(0, PT)[:, None], tl.arange(0, PF)[None, :]
    ptr, valid = maps + row * FROM + column, (row < TO) & (column < FROM)
    if PER_QUERY:
        return tl.load(ptr[None, :, :] + token.to(tl.int64)[:, None, None] * p_t, mask=valid[None, :, :], other=0.0)
    else:
        return tl.load(ptr, mask=valid, other=0.0)


@triton.jit
def _products(
    q_ptr: tl.tensor, k_ptr: tl.tensor, keys: tl.tensor, S: int, H: tl.constexpr, D: tl.constexpr, PH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the products of queries and keys (PH, M, N), accumulated over chunks of BD features."""
    acc, head = tl.zeros([PH, M, N], tl.float32), (tl.arange(0, PH) < H)[:, None, None]
    for part in range(0, D, BD):
        feature = part + tl.arange(0, BD)[None, None, :]
        q = tl.load(q_ptr[:, :, None] + feature, mask=head & (feature < D), other=0.0)
        ptr = k_ptr[:, None, None] + keys.to(tl.int64)[None, :, None] * D + feature
        k = tl.load(ptr, mask=head & (keys < S)[None, :, None] & (feature < D), other=0.0)
        acc = tl.dot(q.to(DOT), tl.permute(k.to(DOT), (0, 2, 1)), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _mix_heads(
    x: tl.tensor, maps: tl.tensor, key_maps: tl.tensor, keys: tl.tensor, S: int, TO: tl.constexpr, FROM: tl.constexpr,
    PT: tl.constexpr, PF: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Map `x` (PF, M, N) across heads to (PT, M, N): one map for all or one per query, plus one per key."""
    if PER_QUERY:
        mixed = tl.permute(tl.dot(maps, tl.permute(x, (1, 0, 2)), input_precision=PRECISION), (1, 0, 2))
    else:
        mixed = tl.reshape(tl.dot(maps, tl.reshape(x, (PF, M * N)), input_precision=PRECISION), (PT, M, N))
    if PER_KEY:
        row, column = tl.arange(0, PT)[None, :, None], tl.arange(0, PF)[None, None, :]
        valid = (row < TO) & (column < FROM) & (keys < S)[:, None, None]
        ptr = key_maps + keys.to(tl.int64)[:, None, None] * (TO * FROM) + row * FROM + column
        key_map = tl.load(ptr, mask=valid, other=0.0)
        per_key = tl.dot(key_map, tl.permute(x, (2, 0, 1)), input_precision=PRECISION)  # (N, to, M)
        mixed += tl.permute(per_key, (1, 2, 0))
    return mixed


@triton.jit
def _apply_mask(
    logits: tl.tensor, m_ptr: tl.tensor, m_s: int, first: tl.tensor, end: tl.tensor, contiguous: tl.tensor,
    keys: tl.tensor, S: int, MASK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Apply the mask to logits (PS, M, N): a row without visible keys gets uniform weights, as in eager attention."""
    valid = (keys < S)[None, None, :]
    ptr = m_ptr[:, :, None] + keys.to(tl.int64)[None, None, :] * m_s
    if MASK == 2:
        logits += tl.load(ptr, mask=valid, other=0.0).to(tl.float32)
    else:
        visible = visible_keys(
            ptr, first[:, :, None], end[:, :, None], contiguous[:, :, None], keys[None, None, :], MASK == 1
        )
        logits = tl.where(visible, logits, -3.4028234663852886e38)
    return tl.where(valid, logits, -float("inf"))
