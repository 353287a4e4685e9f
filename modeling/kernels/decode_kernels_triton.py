"""Triton kernels of `routed_decode_triton`: split-K decoding of one token (as flash-decoding) that skips unused heads.

`decode_split`: one program per (part of the keys, sequence and key/value head) computes a partial softmax for the R
query heads that share the key/value head; it returns at once if none of them is selected. `merge_splits`: one program
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
def decode_split(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, chosen: tl.tensor, mask: tl.tensor, stats: tl.tensor,
    partial: tl.tensor, q_b: int, q_h: int, k_b: int, k_h: int, k_s: int, v_b: int, v_h: int, v_s: int,
    m_b: int, m_s: int, S: int, G: int, scaling: float, MASKED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Store, per part, the row max and sum (B * G, parts, 2, R) and the unnormalised outputs (B * G, parts, R, DV)."""
    part, pair = tl.program_id(0), tl.program_id(1)
    batch, group = (pair // G).to(tl.int64), (pair % G).to(tl.int64)
    if selected_count(chosen, pair, R, BR) == 0:
        return
    member = tl.minimum(tl.arange(0, BR), R - 1)  # padding rows repeat the last query head
    feature, of_value = tl.arange(0, BD)[None, :], tl.arange(0, BDV)[None, :]
    rows = query + batch * q_b + (group * R + member)[:, None] * q_h
    q = tl.load(rows + feature, mask=feature < D, other=0.0).to(DOT)
    row_max, row_sum = tl.full([BR], -1e30, tl.float32), tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, S), N):
        token = start + tl.arange(0, N).to(tl.int64)
        visible = token < S
        if MASKED:
            visible = visible & (tl.load(mask + batch * m_b + token * m_s, mask=visible, other=0) > 0)
        keys = key + batch * k_b + group * k_h + token[:, None] * k_s
        k = tl.load(keys + feature, mask=visible[:, None] & (feature < D), other=0.0).to(DOT)
        values = value + batch * v_b + group * v_h + token[:, None] * v_s
        v = tl.load(values + of_value, mask=visible[:, None] & (of_value < DV), other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scaling * 1.4426950408889634)
        scores = tl.where(visible[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights, rescale = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT), v, acc * rescale[:, None], input_precision=PRECISION)
    slot, row = pair.to(tl.int64) * tl.num_programs(0) + part, tl.arange(0, BR)
    valid = row < R
    tl.store(stats + slot * 2 * R + row, row_max, mask=valid)
    tl.store(stats + (slot * 2 + 1) * R + row, row_sum, mask=valid)
    tl.store(partial + (slot * R + row)[:, None] * DV + of_value, acc, mask=valid[:, None] & (of_value < DV))


@triton.jit
def merge_splits(
    chosen: tl.tensor, stats: tl.tensor, partial: tl.tensor, output: tl.tensor, parts: int,
    R: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr, BDV: tl.constexpr, P: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the parts, P at a time, into outputs (B, H, DV) of the computed heads; zeros where no key is visible."""
    pair, member = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if selected_count(chosen, pair, R, BR) == 0:
        return
    of_value = tl.arange(0, BDV)
    row_max, row_sum, acc = tl.full([1], -1e30, tl.float32), tl.zeros([1], tl.float32), tl.zeros([BDV], tl.float32)
    for first in range(0, parts, P):
        part = first + tl.arange(0, P)
        slot, valid = pair * parts + part, part < parts
        part_max = tl.load(stats + slot * 2 * R + member, mask=valid, other=-1e30)
        part_sum = tl.load(stats + (slot * 2 + 1) * R + member, mask=valid, other=0.0)
        ptr = partial + (slot * R + member)[:, None] * DV + of_value[None, :]
        part_acc = tl.load(ptr, mask=valid[:, None] & (of_value < DV)[None, :], other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        rescale, part_rescale = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(part_sum * part_rescale, 0)
        acc = acc * rescale + tl.sum(part_acc * part_rescale[:, None], 0)
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)
    ptr = output + (pair * R + member) * DV + of_value
    tl.store(ptr, acc.to(output.dtype.element_ty), mask=of_value < DV)


@triton.jit
def selected_count(chosen: tl.tensor, pair: tl.tensor, R: tl.constexpr, BR: tl.constexpr) -> tl.tensor:
    """Return how many of the R query heads of a key/value head are selected in `chosen` (B, H)."""
    member = tl.arange(0, BR)
    return tl.sum(tl.load(chosen + pair * R + member, mask=member < R, other=0).to(tl.int32), 0)
