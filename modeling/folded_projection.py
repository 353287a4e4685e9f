"""A projection and the linear map behind it as one product: what the map costs is paid once.

Where gradients are wanted, that is once for each call, which has many tokens to map. In evaluation, it is once for as
long as the weights stay what they are: the product is a copy beside the parameters, so that saving, training on and
adapting a model know nothing of it. It is made again when one of them has changed. Some optimisers and adapters change
weights without a trace: therefore it is let go where training begins, gradients are wanted, weights move, or another
module takes the projection's place, and none is made while gradients wait for a step. What else writes through a
parameter's `.data` nobody can see: call `train()` and `eval()` after it.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.nn import functional

from .mapped_projection import mapped_projection, precise_product
from .readable_weights import await_a_step, readable, watched_or_wrapped

Source = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None, int, int]
"""Where a weight stands and by what name; the weight, its version and its address as they were."""


@dataclass(frozen=True)
class Product:
    """The weight and bias of a projection, with a map applied to each head, and what they were made of."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    modules: tuple[tuple[nn.Module, type], ...]
    sources: tuple[Source, ...]

    @classmethod
    def of(cls, projection: nn.Linear, behind: nn.Module, size: int) -> Self:
        """As they are now."""
        both = (projection, behind)
        sources = tuple(source for module in both for source in _sources(module))
        return cls(*precise_product(projection, behind, size), tuple((each, type(each)) for each in both), sources)

    def is_of(self, projection: nn.Module, behind: nn.Module) -> bool:
        """Whether it is made of these two, as they are now."""
        return projection is self.modules[0][0] and behind is self.modules[1][0] and self.unchanged()

    def unchanged(self) -> bool:
        """Whether what it was made of is as it was, and nobody watches.

        Every token asks this up to three times in each layer: it looks at no more than what may have changed.
        """
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

    def __call__(self, projection: nn.Linear, behind: nn.Module, size: int, hidden: torch.Tensor) -> torch.Tensor:
        """Heads of `size` features beside each other, projected and mapped; only where `folds` said so just now."""
        if torch.is_grad_enabled():
            return mapped_projection(projection, behind, size, hidden)
        product = self.product
        if product is None:
            product = self.product = Product.of(projection, behind, size)
        return functional.linear(hidden, product.weight, product.bias)

    def stands(self, projection: nn.Module, behind: nn.Module) -> bool:
        """Whether what was made of these two may be read, here and now."""
        product = self.product
        if product is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        return product.is_of(projection, behind)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies and files start empty."""
        return FoldedProjection, ()

    def clear(self) -> None:
        """Let go of it."""
        self.product = None


def folds(kept: FoldedProjection, projection: nn.Module, behind: nn.Module, training: bool) -> bool:
    """Whether the two had better be read as one, here and now; what is out of date is let go."""
    if kept.stands(projection, behind):
        return True
    kept.clear()
    if torch.compiler.is_compiling() or type(projection) is not nn.Linear or behind._modules:
        return False
    if "weight" not in projection._parameters or not behind._parameters:
        return False  # plain attributes, as where a wrapper makes a weight for each call: nobody sees them change
    # A frozen projection would get a gradient for nothing but the map's sake.
    pays = projection.weight.requires_grad if torch.is_grad_enabled() else not training
    return pays and readable(projection, behind) and (torch.is_grad_enabled() or not await_a_step(projection, behind))


def _sources(module: nn.Module) -> list[Source]:
    """Held, so that nothing else can come to lie in their place."""
    place = module._parameters
    return [
        (place, name, weight, *((0, 0) if weight is None else (weight._version, weight.data_ptr())))
        for name, weight in place.items()
    ]
