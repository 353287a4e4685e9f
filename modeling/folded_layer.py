"""A layer that only maps its heads, in evaluation: the stock attention, with the maps in its projections.

Where every map of its only mechanism is folded, nothing is left to ask that mechanism. So there is a twin, which
shares all with the layer but the folded projections, and is run by the stock class: a token costs what it costs there.
It stands for as long as the products do that it was made of.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from .folded_projection import FoldedProjection

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


class FoldedLayer:
    """The twin of a layer; none until it is made."""

    def __init__(self) -> None:
        self._twin: Any = None
        self._products: list[tuple[FoldedProjection, torch.Tensor | None]] = []
        self._places: list[tuple[dict[str, nn.Module | None], str, nn.Module | None]] = []

    def make(self, layer: nn.Module, mixers: nn.ModuleDict, folded: dict[str, FoldedProjection]) -> None:
        """Out of a layer, its only mechanism, and what has just been folded."""
        self._twin = type(layer).__new__(type(layer))
        vars(self._twin).update(vars(layer))
        places = [mixers, *mixers.values()]
        self._places = [(place._modules, name, module) for place in places for name, module in place.named_children()]
        self._products = [(kept, kept.weight) for kept in folded.values()]
        for side, kept in folded.items():
            name, weight = PROJECTIONS[side], cast(torch.Tensor, kept.weight)
            self._places.append((layer._modules, name, layer._modules[name]))
            vars(self._twin)[name] = partial(functional.linear, weight=weight, bias=kept.bias)

    def twin(self) -> Any:
        """The module that stands for the layer, here and now; None where there is none."""
        if self._twin is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or not self._stands():
            return None
        return self._twin

    def _stands(self) -> bool:
        for place, name, module in self._places:
            if place.get(name) is not module:
                return False
        return all(kept.weight is weight and kept.unchanged() for kept, weight in self._products)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies and files start empty."""
        return FoldedLayer, ()

    def clear(self) -> None:
        """Let go of everything."""
        self._twin, self._products, self._places = None, [], []
