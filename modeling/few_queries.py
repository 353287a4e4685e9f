"""Steps of attention for a query or few, which meet one matrix of keys after the other.

Matrices are read where they lie, each once, by the faster products there are. A row is one head's query for one token.
"""

from collections.abc import Iterable

import torch
from torch.nn import functional

from .numerics import apply_mask, widened
from .quick_products import has_kernels, product, round_part


def met_one_by_one(rows: Iterable[torch.Tensor], keys: Iterable[torch.Tensor]) -> torch.Tensor:
    """Logits (n, rows, S): of each of n times some rows (rows, k) with their keys (S, k)."""
    return _together([product(some, of_them).t() for some, of_them in zip(keys, rows, strict=True)])


def settled(logits: torch.Tensor, scale: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits (B, h, rows, S) of keys by their scale (B, h, 1, S), under the mask (B or 1, 1, T, S), widened."""
    logits = logits.to(widened(logits.dtype))
    if scale is not None:
        logits = logits * scale
    if mask is None:
        return logits
    by_head = logits.reshape(len(logits), -1, *mask.shape[2:])  # (B, H, T, S)
    return apply_mask(by_head, mask).view(logits.shape)


def weighed_one_by_one(weights: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sums (n, rows, k): of each of n times values (S, k) under their weights (rows, S)."""
    return _together([_sum_under(of_them, some) for of_them, some in zip(weights, values, strict=True)])


def _together(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Stacked; one is not copied."""
    return matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)


def _sum_under(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of a round number of values by quick products, and of the rest."""
    whole = round_part(len(values)) if has_kernels(values) else len(values)
    found = product(weights[:, :whole].contiguous(), values[:whole].t())
    return found if whole == len(values) else found + functional.linear(weights[:, whole:], values[whole:].t())
