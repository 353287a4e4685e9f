"""A projection and the linear map behind it as one product, in evaluation: what the map costs is paid once.

The product is a copy beside the parameters, which stay as they are, so that saving, training on and adapting a model
know nothing of it. It is made again when one of them has changed, and let go where training begins or weights move.
Writing through a parameter's `.data` is what nobody can see: call `train()` and `eval()` after it.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from .readable_weights import readable


def folds(projection: nn.Module, behind: nn.Module) -> bool:
    """Whether the two may be read as one, here and now."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(projection) is not nn.Linear:
        return False
    return readable(projection, behind)


@dataclass
class FoldedProjection:
    """The weight and bias of a projection, with a map applied to each head; empty until it is called."""

    _made_of: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """The weights as they were, with their versions; held, so that nothing else can come to lie in their place."""
    _weight: torch.Tensor | None = None
    _bias: torch.Tensor | None = None

    def __call__(self, projection: nn.Linear, behind: nn.Module, size: int, hidden: torch.Tensor) -> torch.Tensor:
        """Heads of `size` features beside each other, projected and mapped."""
        weights = [*projection.parameters(), *behind.parameters()]
        if self._weight is None or not self._is_of(weights):
            with torch.autocast(hidden.device.type, enabled=False):
                self._weight, self._bias = _product(projection, behind, size)
            self._made_of = [(weight.detach(), weight._version) for weight in weights]
        return functional.linear(hidden, self._weight, self._bias)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies and files start empty."""
        return FoldedProjection, ()

    def clear(self) -> None:
        """Let go of everything."""
        self._made_of, self._weight, self._bias = [], None, None

    def _is_of(self, weights: list[nn.Parameter]) -> bool:
        if len(weights) != len(self._made_of):
            return False
        pairs = zip(weights, self._made_of, strict=True)
        return all(new.data_ptr() == old.data_ptr() and new._version == version for new, (old, version) in pairs)


def _product(projection: nn.Linear, behind: nn.Module, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of both, in float64 where there is one, so that the same weights give the same bits."""
    weight = projection.weight.detach()
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    turned = behind(torch.eye(size, dtype=weight.dtype, device=weight.device)).to(wide).T

    def mapped(x: torch.Tensor) -> torch.Tensor:
        return (turned @ x.to(wide).unflatten(0, (-1, size))).flatten(0, 1).to(x.dtype)  # (heads, size, columns)

    bias = None if projection.bias is None else mapped(projection.bias.detach().unsqueeze(1)).squeeze(1)
    return mapped(weight), bias
