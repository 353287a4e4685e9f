"""How a mechanism goes back into the stock projections, and when it cannot.

Each rule works on one layer's attention tensors, by their names within the attention, and takes its own away. What
is linear in the features of a head, or across heads, before anything nonlinear is a product of matrices. A mechanism
that still is as it started, where that start was neutral, just goes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from crosshead.modeling.mechanisms.base import HeadLayout, Settings

from .layer_rewrites import Tensors

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@dataclass(frozen=True)
class FoldRule:
    """One mechanism's way back."""

    refusal: Callable[[Settings, HeadLayout], str | None]
    """Why it cannot fold, whatever its values; None where it can."""
    apply: Callable[[Tensors, HeadLayout], Tensors]
    """The layer's tensors with the mechanism worked in; its own are taken away by the caller."""


def fold_knocking(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """`T (W_i x + b_i)` is a projection: every head's rows, mapped."""
    return _folded(tensors, layout, "knocking", "ef,hf...->he...")


def fold_explicit(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """`sum_j C_ij (W_j x + b_j)` is a projection: combined heads' rows from components' rows."""
    return _folded(tensors, layout, "explicit", "ij,jf...->if...")


def _folded(tensors: Tensors, layout: HeadLayout, mechanism: str, product: str) -> Tensors:
    """A mechanism's matrix times the rows (heads, features, ...) of each projection it has one for."""
    folded = dict(tensors)
    for side, projection in PROJECTIONS.items():
        matrix = tensors.get(f"mixers.{mechanism}.{side}.weight")
        for name in (f"{projection}.weight", f"{projection}.bias"):
            if matrix is not None and name in tensors:
                rows = tensors[name].unflatten(0, (-1, layout.head_dim))
                folded[name] = torch.einsum(product, matrix, rows).flatten(0, 1)
    return folded


def keep(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Nothing to work in."""
    return tensors


def refuse_knocking(settings: Settings, layout: HeadLayout) -> str | None:
    """Only the linear form is a matrix."""
    form = settings["form"]
    return None if form == "linear" else f"its form={form!r} is not linear; only form='linear' folds"


def refuse_explicit(settings: Settings, layout: HeadLayout) -> str | None:
    """The norm over head outputs depends on the input."""
    return "its norm=true divides by what the input makes of it; only norm=false folds" if settings["norm"] else None


def refuse_mixture(settings: Settings, layout: HeadLayout) -> str | None:
    """A head that may be off cannot be always on."""
    active, heads, gate = settings["active_heads"], layout.output_heads, settings["gate"]
    if active == heads and gate == "binary":
        return None
    return (
        f"a stock layer has every head on, and this one routes (active_heads={active} of {heads}, gate={gate!r}); "
        "only all heads with gate='binary' fold"
    )


def refuse_talking(settings: Settings, layout: HeadLayout) -> str | None:
    """Stock attention has no place between logits and softmax."""
    return "stock attention has no map across heads on logits or weights"


def refuse_gating(settings: Settings, layout: HeadLayout) -> str | None:
    """A gate that has moved depends on the input."""
    return "its gates depend on the input; it only folds while its weight is zero, where every gate is 1"


def refuse_differential(settings: Settings, layout: HeadLayout) -> str | None:
    """Stock attention has one softmax a head."""
    return "stock attention does not subtract one softmax from another"


FOLD_RULES: dict[str, FoldRule] = {
    "knocking": FoldRule(refuse_knocking, fold_knocking),
    "explicit": FoldRule(refuse_explicit, fold_explicit),
    "mixture": FoldRule(refuse_mixture, keep),
    "talking": FoldRule(refuse_talking, keep),
    "differential": FoldRule(refuse_differential, keep),
    "gating": FoldRule(refuse_gating, keep),
}
"""Mechanism -> its way back; one without an entry does not fold."""
