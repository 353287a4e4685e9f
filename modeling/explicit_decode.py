"""Attention to component heads as the cache holds them, for few queries: the combined heads never exist.

`q_i . K_i = sum_j (C_ij q_i) . B_j`: the scalars go to the queries, and every query head meets every component. With
values, each head's weights meet every component, and the scalars come last: `o_i = sum_j C_ij (w_i B_j)`. What is read
is `h'` heads; what is multiplied is `h'` times that of plain attention, which pays while reading is what takes time.

Here queries are scaled, and stand by the combined head that they share: (B, h, rows, d), a row being one head's query
for one token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .numerics import apply_mask, widened
from .quick_products import has_kernels, product, round_part

LARGE = 2**22
"""Multiplications of all queries with one head's keys from which on heads are met one by one. Measured: with half as
many, all at once is as fast."""


@dataclass(frozen=True)
class Components:
    """Keys or values: (B, heads, S, d), and the scalars (h, heads) that combine them, None where nothing does."""

    heads: torch.Tensor
    scalars: torch.Tensor | None


@dataclass(frozen=True)
class OneSequence:
    """The same without the first dimension: heads (S, d), which may lie anywhere."""

    heads: Sequence[torch.Tensor]
    scalars: torch.Tensor | None


def attend_to_components(
    query: torch.Tensor,
    keys: Components,
    values: Components,
    scale: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Outputs of the shape of the queries.

    `scale` (B, h, 1, S) multiplies combined keys; `mask` (B or 1, 1, T, S) is as the backend gets it.
    """
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clamp_min(torch.finfo(mask.dtype).min)  # what sees nothing stays finite
    if not _one_by_one_pays(query, keys.heads):
        return _at_once(query, keys, values, scale, mask)
    parts = []
    for row in range(len(query)):
        row_keys = OneSequence(list(keys.heads[row]), keys.scalars)
        row_values = OneSequence(list(values.heads[row]), values.scalars)
        row_scale = None if scale is None else scale[row : row + 1]
        row_mask = None if mask is None else mask.expand(len(query), -1, -1, -1)[row : row + 1]
        parts.append(one_by_one(query[row], row_keys, row_values, row_scale, row_mask))
    return torch.stack(parts)


def _one_by_one_pays(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Never off the CPU, nor in a compiled graph, which must not depend on how many keys there are."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return query.shape[1] * query.shape[2] * keys[0, 0].numel() >= LARGE


def _at_once(
    query: torch.Tensor, keys: Components, values: Components, scale: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    logits = torch.matmul(fold_queries(query, keys.scalars), keys.heads.transpose(2, 3))
    if keys.scalars is not None:
        logits = logits.sum(1, dtype=widened(logits.dtype)).unflatten(1, (query.shape[1], -1))
    weights = torch.softmax(_settled(logits, scale, mask), -1).to(query.dtype)  # (B, h, rows, S)
    if values.scalars is not None:
        weights = weights.flatten(1, 2).unsqueeze(1)
    return unfold_outputs(torch.matmul(weights, values.heads), values.scalars)


def one_by_one(
    query: torch.Tensor,
    keys: OneSequence,
    values: OneSequence,
    scale: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """The same of one sequence, (h, rows, d) of queries. Heads are read where they lie, each once."""
    rows = fold_queries(query[None], keys.scalars)[0].contiguous()
    products = (product(head, of_head) for head, of_head in zip(keys.heads, rows, strict=True))  # (S, rows) each
    met = torch.cat(list(products), -1) if keys.scalars is None else _summed(products)
    logits = _settled(met.t().contiguous().view(1, *query.shape[:2], -1), scale, mask)
    weights = torch.softmax(logits, -1)[0].to(query.dtype)  # (h, rows, S)
    if values.scalars is not None:
        weights = weights.flatten(0, 1).unsqueeze(0)
    whole = round_part(met.shape[0]) if has_kernels(query) else met.shape[0]
    outputs = _weighed(weights, values.heads, slice(0, whole), product)
    if whole < met.shape[0]:
        outputs += _weighed(weights, values.heads, slice(whole, None), functional.linear)
    return unfold_outputs(outputs[None], values.scalars)[0]


def _weighed(
    weights: torch.Tensor,
    heads: Sequence[torch.Tensor],
    span: slice,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Some of each head's values (S, d) under weights (heads or 1, rows, S)."""
    part = weights[..., span].contiguous().expand(len(heads), -1, -1)
    return torch.stack([multiply(of_head, head[span].t()) for of_head, head in zip(part, heads, strict=True)])


def fold_queries(query: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, h, rows, d) -> (B, components, h * rows, d), or as they are where nothing combines keys."""
    if scalars is None:
        return query
    return (query.unsqueeze(1) * scalars.t()[:, :, None, None]).flatten(2, 3)


def unfold_outputs(met: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, components, h * rows, d) -> (B, h, rows, d), or as they are where nothing combines values."""
    if scalars is None:
        return met
    return (met.unflatten(2, (scalars.shape[0], -1)) * scalars.t()[:, :, None, None]).sum(1)


def _summed(products: Iterable[torch.Tensor]) -> torch.Tensor:
    """In the widened dtype."""
    found = iter(products)
    first = next(found)
    total = first.to(widened(first.dtype))
    for each in found:
        total += each
    return total


def _settled(logits: torch.Tensor, scale: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits (N, h, rows, keys) of normed keys, under the mask (N or 1, 1, T, keys)."""
    logits = logits.to(widened(logits.dtype))
    if scale is not None:
        logits = logits * scale
    if mask is None:
        return logits
    by_head = logits.flatten(1, 2).unflatten(1, (-1, mask.shape[2]))  # (N, H, T, keys)
    return apply_mask(by_head, mask).view(logits.shape)
