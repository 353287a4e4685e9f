"""A projection and the linear map behind it as one product: what the map costs is paid once.

Where gradients are wanted, that is once for each call, which has many tokens to map. In evaluation, it is once for as
long as the weights stay what they are: the product is a copy beside the parameters, so that saving, training on and
adapting a model know nothing of it. It is made again when one of them has changed, but not again and again, as where
weights come and go with each call. Some optimisers and adapters change weights without a trace: therefore it is let go
where an optimiser steps, training begins, gradients are wanted, weights move, or another module takes the projection's
place, and none is made while gradients wait for a step. What else writes into a parameter's memory, through its
`.data`, by `torch.distributed` or from another process, nobody can see: call `train()` and `eval()` after it.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from .mapped_projection import mapped_projection, precise_product
from .optimiser_steps import last_step
from .readable_weights import await_a_step, readable, watched_or_wrapped

MOST_LOST = 2
"""After which a map is left where it is, until training or evaluation begins."""
Source = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None, int, int]
"""Where a weight stands and by what name; the weight, its version and its address as they were."""


@dataclass(frozen=True)
class Product:
    """The weight and bias of a projection, with a map applied to each head, and what they were made of."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    modules: tuple[tuple[nn.Module, type], ...]
    sources: tuple[Source, ...]
    step: object

    @classmethod
    def of(cls, projection: nn.Linear, behind: nn.Module, size: int) -> Self:
        """As they are now."""
        both = (projection, behind)
        sources = tuple(source for module in both for source in _sources(module))
        modules = tuple((module, type(module)) for module in both)
        return cls(*precise_product(projection, behind, size), modules, sources, last_step())

    def is_of(self, projection: nn.Module, behind: nn.Module) -> bool:
        """Whether it is made of these two, as they are now, and nobody watches.

        Every token asks this up to three times in each layer: it looks at no more than what may have changed.
        """
        if projection is not self.modules[0][0] or behind is not self.modules[1][0] or self.step is not last_step():
            return False
        for module, kind in self.modules:
            if type(module) is not kind or watched_or_wrapped(module):
                return False
        for place, name, weight, version, address in self.sources:
            if place.get(name) is not weight:
                return False
            if weight is None:
                continue
            if weight.grad is not None or weight._version != version or weight.data_ptr() != address:
                return False
        return True


class FoldedProjection:
    """A projection that maps each head, by a product that is kept; none until it is called."""

    product: Product | None = None
    """Replaced as one, as several threads may evaluate a model."""
    lost = 0
    """How many products did not last."""

    def __call__(self, projection: nn.Linear, behind: nn.Module, size: int, hidden: torch.Tensor) -> torch.Tensor:
        """Heads of `size` features beside each other, projected and mapped; only where `folds` said so just now."""
        if torch.is_grad_enabled():
            return mapped_projection(projection, behind, size, hidden)
        product = self.product
        if product is None:
            product = Product.of(projection, behind, size)
            if type(product.weight) is torch.Tensor:  # not of a mode, outside which it means nothing
                self.product = product
        return functional.linear(hidden, product.weight, product.bias)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies and files start empty."""
        return FoldedProjection, ()

    def clear(self) -> None:
        """Let go of it, and begin anew."""
        self.product, self.lost = None, 0


def folds(kept: FoldedProjection, projection: nn.Linear, behind: nn.Module, training: bool) -> bool:
    """Whether the two had better be read as one, where nothing traces it; what is out of date is let go."""
    product = kept.product
    if torch.is_grad_enabled():
        kept.product = None
        # A frozen projection would get a gradient for nothing but the map's sake.
        return _foldable(projection, behind) and projection.weight.requires_grad
    if product is not None:
        if product.is_of(projection, behind):
            return True
        kept.product, kept.lost = None, kept.lost + 1
    if training or kept.lost >= MOST_LOST:
        return False
    return _foldable(projection, behind) and not await_a_step(projection, behind)


def _foldable(projection: nn.Module, behind: nn.Module) -> bool:
    """Whether their parameters tell all of them; plain attributes nobody sees change."""
    if type(projection) is not nn.Linear or behind._modules:
        return False
    return "weight" in projection._parameters and bool(behind._parameters) and readable(projection, behind)


def _sources(module: nn.Module) -> list[Source]:
    """Held, so that nothing else can come to lie in their place."""
    place = module._parameters
    return [
        (place, name, weight, *((0, 0) if weight is None else (weight._version, weight.data_ptr())))
        for name, weight in place.items()
    ]
