"""A layer that only maps its heads, in evaluation: the stock attention, with the maps in its projections.

Where every map of its only mechanism is folded, nothing is left to ask that mechanism. So there is a twin, which
shares all with the layer but the folded projections, and is run by the stock class: a token costs what it costs there.
It stands for as long as the products do that it was made of.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .folded_projection import FoldedProjection, Product

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
Place = tuple[dict[str, nn.Module | None], str, nn.Module | None]
"""Where a module stands and by what name, and the module."""


@dataclass(frozen=True)
class Twin:
    """The module that stands for a layer, and what it was made of."""

    module: Any
    products: tuple[tuple[FoldedProjection, Product], ...]
    places: tuple[Place, ...]

    def stands_for(self, layer: nn.Module) -> bool:
        """Whether it is of this layer, not of one that this was copied from, and all is as it was."""
        if vars(self.module)["_modules"] is not layer._modules:
            return False
        for place, name, module in self.places:
            if place.get(name) is not module:
                return False
        return all(kept.product is product and product.unchanged() for kept, product in self.products)


class FoldedLayer:
    """The twin of a layer; none until it is made."""

    _twin: Twin | None = None
    """Replaced as one, as several threads may evaluate a model."""

    def make(self, layer: nn.Module, mixers: nn.ModuleDict, folded: dict[str, FoldedProjection]) -> None:
        """Out of a layer, its only mechanism, and what has just been folded."""
        module = type(layer).__new__(type(layer))
        vars(module).update(vars(layer))
        homes = [mixers, *mixers.values()]
        places: list[Place] = [(home._modules, *found) for home in homes for found in home.named_children()]
        products = []
        for side, kept in folded.items():
            name, product = PROJECTIONS[side], kept.product
            if product is None:  # another thread has let go of it
                return
            products.append((kept, product))
            places.append((layer._modules, name, layer._modules[name]))
            vars(module)[name] = partial(functional.linear, weight=product.weight, bias=product.bias)
        self._twin = Twin(module, tuple(products), tuple(places))

    def twin(self, layer: nn.Module) -> Any:
        """The module that stands for the layer, here and now; None where there is none."""
        twin = self._twin
        if twin is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or not twin.stands_for(layer):
            return None
        return twin.module

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies and files start empty."""
        return FoldedLayer, ()

    def clear(self) -> None:
        """Let go of it."""
        self._twin = None
