"""Triton kernels of `talking_triton`: one program holds all heads of a tile of queries and keys.

The second map mixes normalised weights of several heads, so an online softmax is impossible: there are two passes over
the keys. `softmax_norms` stores the row max and the reciprocal row sum of each softmax head; `weighted_values`
recomputes the logits, applies softmax and the second map, and multiplies by the values. Tiles are (heads, queries,
keys); the maps are padded with zeros.

B sequences, T tokens, S keys, D features of queries and keys, DV of values. Heads: H of queries, G of keys and values,
HS of the softmax (after the first map), HV of the outputs (after the second map), HM of the mask; PH, PS and PV are H,
HS and HV padded to powers of two. M queries and N keys per tile; BD features per `tl.dot`, BDV output features per
program. Strides of the first map (p), the second map (r) and the mask (m): `*_b` over sequences, `*_h` over heads,
`*_t` over tokens, `*_s` over keys. `spans` is `seen_keys` of the mask, `total` its stride over the three numbers.
MASK: 0 without a mask, 1 boolean, 2 additive. PER_QUERY: one first map per query instead of one for all; PER_KEY: each
key adds a map. MORE_PER_QUERY and MORE_PER_KEY: the same for the second map.
"""

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from .routed_kernels_triton import blocks_of, keys_at, stretches, visible
from .visible_triton import keys_of


@triton.jit
def softmax_norms(
    query: tl.tensor, key: tl.tensor, maps: tl.tensor, key_maps: tl.tensor, mask: tl.tensor, spans: tl.tensor,
    norms: tl.tensor, p_b: int, p_t: int, m_b: int, m_h: int, m_t: int, m_s: int, T: int, S: int, total: int,
    scaling: float, HM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr, D: tl.constexpr,
    PH: tl.constexpr, PS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
    PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per softmax head and query, the row max m and 1 / sum(exp(logit - m)): (2, B, HS, T)."""
    batch, to = tl.program_id(1).to(tl.int64), tl.arange(0, PS)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    real, token = token < T, tl.minimum(token, T - 1)  # padding rows repeat the last token
    q_at, k_at, m_at = _places(query, key, mask, batch, token, m_b, m_h, m_t, T, S, HM, H, G, D, PH, PS)
    first_map = _map_of(maps + batch * p_b, token, p_t, HS, H, PS, PH, PER_QUERY)
    first, end, whole = _keys_of(spans, batch, token, T, S, total, HM, PS, MASK, CAUSAL)
    low, start, stop, high = stretches(first, end, whole, N)
    best, sums = tl.full([PS, M], -float("inf"), tl.float32), tl.zeros([PS, M], tl.float32)
    for edge in tl.static_range(2):
        for step in range(blocks_of(low, start, stop, high, N, edge)):
            keys = keys_at(step, low, start, stop, N, edge)
            logits = _products(q_at, k_at, keys, S, H, D, PH, M, N, BD, DOT, PRECISION) * scaling
            logits = _mapped(
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
                logits = _hidden(logits, m_at, m_s, first, end, whole, keys, S, MASK)
            better = tl.maximum(best, tl.max(logits, 2))
            sums = sums * tl.exp(best - better) + tl.sum(tl.exp(logits - better[:, :, None]), 2)
            best = better
    at = norms + (batch * HS + to)[:, None] * T + token[None, :]
    there = (to < HS)[:, None] & real[None, :]
    tl.store(at, best, mask=there)
    tl.store(at + tl.num_programs(1).to(tl.int64) * HS * T, 1 / sums, mask=there)


@triton.jit
def weighted_values(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, output: tl.tensor,
    maps: tl.tensor, key_maps: tl.tensor, more_maps: tl.tensor, more_key_maps: tl.tensor, mask: tl.tensor,
    spans: tl.tensor, norms: tl.tensor, p_b: int, p_t: int, r_b: int, r_t: int, m_b: int, m_h: int, m_t: int, m_s: int,
    T: int, S: int, total: int, scaling: float, HM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, HS: tl.constexpr,
    HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PH: tl.constexpr, PS: tl.constexpr, PV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PER_QUERY: tl.constexpr,
    PER_KEY: tl.constexpr, MORE_PER_QUERY: tl.constexpr, MORE_PER_KEY: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store BDV features of the outputs (B, T, HV, DV); the third grid axis covers DV."""
    batch, to = tl.program_id(1).to(tl.int64), tl.arange(0, PS)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    real, token = token < T, tl.minimum(token, T - 1)
    q_at, k_at, m_at = _places(query, key, mask, batch, token, m_b, m_h, m_t, T, S, HM, H, G, D, PH, PS)
    first_map = _map_of(maps + batch * p_b, token, p_t, HS, H, PS, PH, PER_QUERY)
    second_map = _map_of(more_maps + batch * r_b, token, r_t, HV, HS, PV, PS, MORE_PER_QUERY)
    first, end, whole = _keys_of(spans, batch, token, T, S, total, HM, PS, MASK, CAUSAL)
    low, start, stop, high = stretches(first, end, whole, N)
    norms += (batch * HS + to)[:, None] * T + token[None, :]
    best = tl.load(norms, mask=(to < HS)[:, None], other=0.0)[:, :, None]
    share = tl.load(norms + tl.num_programs(1).to(tl.int64) * HS * T, mask=(to < HS)[:, None], other=0.0)[:, :, None]
    head, feature = tl.arange(0, PV), tl.program_id(2) * BDV + tl.arange(0, BDV)
    there = (head < HV)[:, None, None] & (feature < DV)[None, None, :]
    v_at = value + ((batch * G + head // (HV // G)) * S * DV)[:, None, None] + feature[None, None, :]
    found = tl.zeros([PV, M, BDV], tl.float32)
    for edge in tl.static_range(2):
        for step in range(blocks_of(low, start, stop, high, N, edge)):
            keys = keys_at(step, low, start, stop, N, edge)
            x = _products(q_at, k_at, keys, S, H, D, PH, M, N, BD, DOT, PRECISION) * scaling
            of_keys = key_maps + batch * S * HS * H
            x = _mapped(x, first_map, of_keys, keys, S, HS, H, PS, PH, M, N, PER_QUERY, PER_KEY, PRECISION)
            if edge:
                x = _hidden(x, m_at, m_s, first, end, whole, keys, S, MASK)
            x = tl.exp(x - best) * share
            of_keys = more_key_maps + batch * S * HV * HS
            x = _mapped(x, second_map, of_keys, keys, S, HV, HS, PV, PS, M, N, MORE_PER_QUERY, MORE_PER_KEY, PRECISION)
            v = tl.load(
                v_at + keys.to(tl.int64)[None, :, None] * DV, mask=there & (keys < S)[None, :, None], other=0.0
            )
            found = tl.dot(x.to(DOT), v.to(DOT), found, input_precision=PRECISION)
    row = ((batch * T + token)[None, :] * HV + head[:, None])[:, :, None]
    at = output + row * DV + feature[None, None, :]
    tl.store(at, found.to(output.dtype.element_ty), mask=there & real[None, :, None])


@triton.jit
def _places(
    query: tl.tensor, key: tl.tensor, mask: tl.tensor, batch: tl.tensor, token: tl.tensor,
    m_b: int, m_h: int, m_t: int, T: int, S: int, HM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    PH: tl.constexpr, PS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return pointers to the queries (PH, M), to the first key of each head (PH), and to the mask rows (PS, M)."""
    head, of_mask, row = tl.arange(0, PH), tl.minimum(tl.arange(0, PS), HM - 1).to(tl.int64), token.to(tl.int64)
    q_at = query + (batch * H + head)[:, None] * T * D + row[None, :] * D
    k_at = key + (batch * G + head // (H // G)) * S * D
    return q_at, k_at, mask + batch * m_b + of_mask[:, None] * m_h + row[None, :] * m_t


@triton.jit
def _keys_of(
    spans: tl.tensor, batch: tl.tensor, token: tl.tensor, T: int, S: int, total: int,
    HM: tl.constexpr, PS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return `keys_of` per softmax head and query (PS, M): a row without visible keys gets the range of all keys.

    With an additive mask, no range counts as complete, so the mask is added to every block.
    """
    row = (batch * HM + tl.minimum(tl.arange(0, PS), HM - 1))[:, None] * T + token[None, :]
    first, end, whole = keys_of(spans, row, token[None, :], total, S, MASK > 0, CAUSAL)
    if MASK > 0:
        blind = end == 0
        first, end = tl.where(blind, 0, first), tl.where(blind, S, end)
        whole = whole & (MASK == 1)
    return first, end, whole


@triton.jit
def _map_of(
    maps: tl.tensor, token: tl.tensor, p_t: int, TO: tl.constexpr, FROM: tl.constexpr,
    PT: tl.constexpr, PF: tl.constexpr, PER_QUERY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the map from FROM to TO heads, padded: (PT, PF), or (M, PT, PF) with one map per query."""
    row, column = tl.arange(0, PT)[:, None], tl.arange(0, PF)[None, :]
    at, real = maps + row * FROM + column, (row < TO) & (column < FROM)
    if PER_QUERY:
        return tl.load(at[None, :, :] + token.to(tl.int64)[:, None, None] * p_t, mask=real[None, :, :], other=0.0)
    else:
        return tl.load(at, mask=real, other=0.0)


@triton.jit
def _products(
    q_at: tl.tensor, k_at: tl.tensor, keys: tl.tensor, S: int, H: tl.constexpr, D: tl.constexpr, PH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the products of queries and keys (PH, M, N), accumulated over chunks of BD features."""
    found, head = tl.zeros([PH, M, N], tl.float32), (tl.arange(0, PH) < H)[:, None, None]
    for part in range(0, D, BD):
        feature = part + tl.arange(0, BD)[None, None, :]
        q = tl.load(q_at[:, :, None] + feature, mask=head & (feature < D), other=0.0)
        at = k_at[:, None, None] + keys.to(tl.int64)[None, :, None] * D + feature
        k = tl.load(at, mask=head & (keys < S)[None, :, None] & (feature < D), other=0.0)
        found = tl.dot(q.to(DOT), tl.permute(k.to(DOT), (0, 2, 1)), found, input_precision=PRECISION)
    return found


@triton.jit
def _mapped(
    x: tl.tensor, maps: tl.tensor, key_maps: tl.tensor, keys: tl.tensor, S: int, TO: tl.constexpr, FROM: tl.constexpr,
    PT: tl.constexpr, PF: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Map `x` (PF, M, N) across heads to (PT, M, N): one map for all or one per query, plus one per key."""
    if PER_QUERY:
        found = tl.permute(tl.dot(maps, tl.permute(x, (1, 0, 2)), input_precision=PRECISION), (1, 0, 2))
    else:
        found = tl.reshape(tl.dot(maps, tl.reshape(x, (PF, M * N)), input_precision=PRECISION), (PT, M, N))
    if PER_KEY:
        row, column = tl.arange(0, PT)[None, :, None], tl.arange(0, PF)[None, None, :]
        real = (row < TO) & (column < FROM) & (keys < S)[:, None, None]
        at = key_maps + keys.to(tl.int64)[:, None, None] * (TO * FROM) + row * FROM + column
        of_keys = tl.load(at, mask=real, other=0.0)
        more = tl.dot(of_keys, tl.permute(x, (2, 0, 1)), input_precision=PRECISION)  # (N, to, M)
        found += tl.permute(more, (1, 2, 0))
    return found


@triton.jit
def _hidden(
    logits: tl.tensor, m_at: tl.tensor, m_s: int, first: tl.tensor, end: tl.tensor, whole: tl.tensor, keys: tl.tensor,
    S: int, MASK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Apply the mask to logits (PS, M, N): a row without visible keys gets uniform weights, as in eager attention."""
    real = (keys < S)[None, None, :]
    at = m_at[:, :, None] + keys.to(tl.int64)[None, None, :] * m_s
    if MASK == 2:
        logits += tl.load(at, mask=real, other=0.0).to(tl.float32)
    else:
        seen = visible(at, first[:, :, None], end[:, :, None], whole[:, :, None], keys[None, None, :], MASK == 1)
        logits = tl.where(seen, logits, -3.4028234663852886e38)
    return tl.where(real, logits, -float("inf"))
