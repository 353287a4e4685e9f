"""Triton kernels of `routed_decode_triton`: split-K decoding of one token (as flash-decoding) that skips unused heads.

`attend_to_part`: one program per (part of the keys, sequence and key/value head) computes a partial softmax for the R
query heads that share the key/value head; it returns at once if none of them is selected. `join_parts`: one program
per (sequence and key/value head, query head) merges the partial results. Softmax uses base 2: `exp2`, with log2(e)
folded into the scale.

B sequences, H query heads, G key/value heads, R = H / G, S keys, D features of queries and keys, DV of values. BR, BD
and BDV are R, D and DV padded to powers of two; N keys per tile, PART keys per program. Strides of query (q), key (k),
value (v) and mask (m): `*_b` over sequences, `*_h` over heads, `*_s` over keys. DOT: dtype of the matmul operands.
"""

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise


@triton.jit
def attend_to_part(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, chosen: tl.tensor, mask: tl.tensor, sums: tl.tensor,
    found: tl.tensor, q_b: int, q_h: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int,
    m_b: int, m_s: int, S: int, G: int, scaling: float, MASKED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per part, the row max and sum (B * G, parts, 2, R) and the unnormalised outputs (B * G, parts, R, DV)."""
    part, pair = tl.program_id(0), tl.program_id(1)
    batch, group = (pair // G).to(tl.int64), (pair % G).to(tl.int64)
    if counting(chosen, pair, R, BR) == 0:
        return
    reader = tl.minimum(tl.arange(0, BR), R - 1)  # padding rows repeat the last query head
    feature, of_value = tl.arange(0, BD)[None, :], tl.arange(0, BDV)[None, :]
    rows = query + batch * q_b + (group * R + reader)[:, None] * q_h
    q = tl.load(rows + feature, mask=feature < D, other=0.0).to(DOT)
    best, total = tl.full([BR], -1e30, tl.float32), tl.zeros([BR], tl.float32)
    outputs = tl.zeros([BR, BDV], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, S), N):
        token = start + tl.arange(0, N).to(tl.int64)
        seen = token < S
        if MASKED:
            seen = seen & (tl.load(mask + batch * m_b + token * m_s, mask=seen, other=0) > 0)
        keys = key + batch * k_b + group * k_h + token[:, None] * k_s
        k = tl.load(keys + feature, mask=seen[:, None] & (feature < D), other=0.0).to(DOT)
        values = value + batch * v_b + group * v_h + token[:, None] * v_s
        v = tl.load(values + of_value, mask=seen[:, None] & (of_value < DV), other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - better[:, None]), tl.exp2(best - better)
        best, total = better, total * shrink + tl.sum(weights, 1)
        outputs = tl.dot(weights.to(DOT), v, outputs * shrink[:, None], input_precision=PRECISION)
    slot, row = pair.to(tl.int64) * tl.num_programs(0) + part, tl.arange(0, BR)
    real = row < R
    tl.store(sums + slot * 2 * R + row, best, mask=real)
    tl.store(sums + (slot * 2 + 1) * R + row, total, mask=real)
    tl.store(found + (slot * R + row)[:, None] * DV + of_value, outputs, mask=real[:, None] & (of_value < DV))


@triton.jit
def join_parts(
    chosen: tl.tensor, sums: tl.tensor, found: tl.tensor, output: tl.tensor, parts: int,
    R: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr, BDV: tl.constexpr, P: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the parts, P at a time, into outputs (B, H, DV) of the computed heads; zeros where no key is visible."""
    pair, reader = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if counting(chosen, pair, R, BR) == 0:
        return
    of_value = tl.arange(0, BDV)
    best, total, outputs = tl.full([1], -1e30, tl.float32), tl.zeros([1], tl.float32), tl.zeros([BDV], tl.float32)
    for first in range(0, parts, P):
        part = first + tl.arange(0, P)
        slot, real = pair * parts + part, part < parts
        its_best = tl.load(sums + slot * 2 * R + reader, mask=real, other=-1e30)
        its_total = tl.load(sums + (slot * 2 + 1) * R + reader, mask=real, other=0.0)
        at = found + (slot * R + reader)[:, None] * DV + of_value[None, :]
        its = tl.load(at, mask=real[:, None] & (of_value < DV)[None, :], other=0.0)
        better = tl.maximum(best, tl.max(its_best, 0))
        shrink, its_shrink = tl.exp2(best - better), tl.exp2(its_best - better)
        best, total = better, total * shrink + tl.sum(its_total * its_shrink, 0)
        outputs = outputs * shrink + tl.sum(its * its_shrink[:, None], 0)
    outputs = outputs / tl.where(total > 0, total, 1.0)
    at = output + (pair * R + reader) * DV + of_value
    tl.store(at, outputs.to(output.dtype.element_ty), mask=of_value < DV)


@triton.jit
def counting(chosen: tl.tensor, pair: tl.tensor, R: tl.constexpr, BR: tl.constexpr) -> tl.tensor:
    """Return how many of the R query heads of a key/value head are selected in `chosen` (B, H)."""
    reader = tl.arange(0, BR)
    return tl.sum(tl.load(chosen + pair * R + reader, mask=reader < R, other=0).to(tl.int32), 0)
