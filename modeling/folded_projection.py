"""A projection and the linear map behind it as one product: what the map costs is paid once.

Where gradients are wanted, that is once for each call, and gradients reach both through the product: less is kept,
and a batch of training has many tokens to map. In evaluation, it is once for as long as the weights stay what they
are: the product is a copy beside the parameters, so that saving, training on and adapting a model know nothing of
it. It is made again when one of them has changed. Some optimisers and adapters change weights without a trace:
therefore it is let go where training begins, gradients are wanted, weights move, or another module takes the
projection's place, and none is made while gradients wait for a step. What else writes through a parameter's `.data`
nobody can see: call `train()` and `eval()` after it.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from .readable_weights import await_a_step, readable, weights_of


def folds(projection: nn.Module, behind: nn.Module, training: bool) -> bool:
    """Whether the two had better be read as one, here and now."""
    if torch.compiler.is_compiling() or type(projection) is not nn.Linear:
        return False
    # A frozen projection would get a gradient for nothing but the map's sake.
    pays = projection.weight.requires_grad if torch.is_grad_enabled() else not training
    return pays and readable(projection, behind) and (torch.is_grad_enabled() or not await_a_step(projection, behind))


@dataclass
class FoldedProjection:
    """The weight and bias of a projection, with a map applied to each head; empty until it is called."""

    _made_of: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """The weights as they were, with their versions; held, so that nothing else can come to lie in their place."""
    _weight: torch.Tensor | None = None
    _bias: torch.Tensor | None = None

    def __call__(self, projection: nn.Linear, behind: nn.Module, size: int, hidden: torch.Tensor) -> torch.Tensor:
        """Heads of `size` features beside each other, projected and mapped."""
        if torch.is_grad_enabled():
            self.clear()
            return functional.linear(hidden, *_product(projection, behind, size))
        weights = weights_of(projection, behind)
        if self._weight is None or not self._is_of(weights):
            self._weight, self._bias = _product(projection, behind, size, precise=True)
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
        for new, (old, version) in zip(weights, self._made_of, strict=True):
            if new._version != version or new.data_ptr() != old.data_ptr():
                return False
        return True


def _product(
    projection: nn.Linear, behind: nn.Module, size: int, precise: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of both; in float64 where asked and to be had, that the same weights give the same bits."""
    weight, bias = projection.weight, projection.bias
    wide = weight.dtype if not precise else torch.float32 if weight.device.type == "mps" else torch.float64
    with torch.autocast(weight.device.type, enabled=False):
        turned = behind(torch.eye(size, dtype=weight.dtype, device=weight.device)).to(wide).T

        def mapped(x: torch.Tensor) -> torch.Tensor:
            return (turned @ x.to(wide).unflatten(0, (-1, size))).flatten(0, 1).to(x.dtype)  # (heads, size, columns)

        return mapped(weight), None if bias is None else mapped(bias.unsqueeze(1)).squeeze(1)
