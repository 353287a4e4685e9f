"""Reorders query heads so that the most used heads come first; each query head stays with its KV head.

The shared heads of a mixture are its first heads. To share the most used heads, the groups of query heads that share a
KV head are permuted, and the query heads within each group; the layer's outputs do not change.
"""

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.mechanisms.mixture import query_norm_scores

from ..architectures.families import Shapes
from .layer_rewrites import PROJECTIONS, Tensors

_SIDES = {projection: side for side, projection in PROJECTIONS.items()}


class HeadUse:
    """Counts how often a query_norm router selects each query head of a layer, if it routes all heads."""

    def __init__(self, heads: int, active: int) -> None:
        self.active = active
        self.sums = {"counts": torch.zeros(heads, dtype=torch.float64)}

    @torch.no_grad()
    def observe(self, attention: nn.Module, hidden: torch.Tensor, position_embeddings: object) -> None:
        """Add the tokens of one window, given the attention's input (B, T, hidden)."""
        counts = self.sums["counts"]
        projected: torch.Tensor = attention.q_proj(hidden)  # type: ignore[operator]
        query = projected.unflatten(-1, (len(counts), -1)).transpose(1, 2)
        selected = query_norm_scores(query).topk(self.active, dim=-1).indices
        counts += torch.bincount(selected.flatten(), minlength=len(counts)).to(counts)

    @staticmethod
    def shapes(layout: HeadLayout) -> Shapes:
        """Return the names and shapes of the tensors in a calibration file."""
        return {"counts": (layout.query_heads,)}


def most_used_first(use: torch.Tensor, groups: int, shared: int) -> list[int]:
    """Return the order of query heads with the maximum total use of the first `shared`; groups stay together."""
    size = len(use) // groups
    by_group = use.reshape(groups, size)
    order = by_group.argsort(dim=1, descending=True, stable=True)
    ranked = by_group.gather(1, order)
    full, partial = divmod(shared, size)  # complete groups, and heads of one more group
    totals, heads = ranked.sum(1), ranked[:, :partial].sum(1)
    by_total = totals.argsort(descending=True, stable=True).tolist()

    def with_split(split: int) -> list[int]:
        others = [group for group in by_total if group != split]
        return [*others[:full], split, *others[full:]]

    def shared_use(split: int) -> float:
        return float(totals[with_split(split)[:full]].sum() + heads[split])

    group_order = with_split(max(range(groups), key=shared_use)) if partial else by_total
    return [group * size + int(head) for group in group_order for head in order[group]]


def reorder(tensors: Tensors, order: list[int], layout: HeadLayout) -> Tensors:
    """Return the attention tensors of a layer, by part, with their heads in another order.

    If keys or values are combined from component heads, the rows of the scalars are reordered, not the components.
    """
    size = len(order) // layout.key_value_heads
    groups = [order[start] // size for start in range(0, len(order), size)]
    reordered = dict(tensors)
    for name, tensor in tensors.items():
        role = name.split(".")[0]
        if role == "q_proj":
            reordered[name] = _permute_rows(tensor, order)
        elif name == "o_proj.weight":
            reordered[name] = _permute_rows(tensor.T, order).T.contiguous()
        elif name in ("mixers.explicit.key.weight", "mixers.explicit.value.weight"):
            reordered[name] = tensor[groups]
        elif role in _SIDES and f"mixers.explicit.{_SIDES[role]}.weight" not in tensors:
            reordered[name] = _permute_rows(tensor, groups)
    return reordered


def _permute_rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Permute blocks of rows, one block per head."""
    return tensor.unflatten(0, (len(order), -1))[order].flatten(0, 1)
