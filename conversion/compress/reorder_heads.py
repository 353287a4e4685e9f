"""Which heads come first: a permutation of query heads that keeps each with its key/value head.

A mixture's shared heads are the first ones. To share the heads that are used most, whole groups of query heads move,
and heads move within their group; the layer computes what it did.
"""

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.mechanisms.mixture import query_norm_scores

Tensors = dict[str, torch.Tensor]


class HeadUse:
    """How often the router would select each query head of a layer, were all of them routed."""

    def __init__(self, heads: int, active: int) -> None:
        self.active = active
        self.counts = torch.zeros(heads, dtype=torch.float64)

    @torch.no_grad()
    def observe(self, attention: nn.Module, hidden: torch.Tensor, position_embeddings: object) -> None:
        """Add the tokens of one window, given the attention's input (B, T, hidden)."""
        projected: torch.Tensor = attention.q_proj(hidden)  # type: ignore[operator]
        query = projected.unflatten(-1, (len(self.counts), -1)).transpose(1, 2)
        chosen = query_norm_scores(query).topk(self.active, dim=-1).indices
        self.counts += torch.bincount(chosen.flatten(), minlength=len(self.counts)).to(self.counts)

    def as_tensors(self) -> Tensors:
        """What was counted."""
        return {"counts": self.counts}


def most_used_first(use: torch.Tensor, groups: int, shared: int) -> list[int]:
    """The order of query heads whose first `shared` are used most, among the orders that keep groups whole."""
    size = len(use) // groups
    by_group = use.reshape(groups, size)
    order = by_group.argsort(dim=1, descending=True, stable=True)
    ranked = by_group.gather(1, order)
    full, partial = divmod(shared, size)
    totals, heads = ranked.sum(1), ranked[:, :partial].sum(1)

    def lead(split: int) -> list[int]:
        others = [group for group in totals.argsort(descending=True, stable=True).tolist() if group != split]
        return [*others[:full], split, *others[full:]]

    def gain(split: int) -> float:
        return float(totals[lead(split)[:full]].sum() + heads[split])

    best = max(range(groups), key=gain) if partial else int(totals.argmax())
    chosen = lead(best) if partial else totals.argsort(descending=True, stable=True).tolist()
    return [group * size + int(head) for group in chosen for head in order[group]]


def reorder(tensors: Tensors, order: list[int], layout: HeadLayout) -> Tensors:
    """The attention tensors of a layer (names without the layer's prefix) with their heads in another order.

    Where keys or values are combined from components, the combinations move and the components stay.
    """
    size = len(order) // layout.key_value_heads
    groups = [order[start] // size for start in range(0, len(order), size)]
    moved = dict(tensors)
    for name, tensor in tensors.items():
        role = name.split(".")[0]
        if role == "q_proj":
            moved[name] = _rows(tensor, order)
        elif name == "o_proj.weight":
            moved[name] = _rows(tensor.T, order).T.contiguous()
        elif name in ("mixers.explicit.key.weight", "mixers.explicit.value.weight"):
            moved[name] = tensor[groups]
        elif role in ("k_proj", "v_proj") and f"mixers.explicit.{_SIDES[role]}.weight" not in tensors:
            moved[name] = _rows(tensor, groups)
    return moved


_SIDES = {"k_proj": "key", "v_proj": "value"}


def _rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Blocks of rows, one block per head, in another order."""
    return tensor.unflatten(0, (len(order), -1))[order].flatten(0, 1)
