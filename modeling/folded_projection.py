"""A projection and the linear map behind it as one product, in evaluation: what the map costs is paid once.

The product is a copy beside the parameters, which stay as they are, so that saving, training on and adapting a model
know nothing of it. It is made again when one of them has changed, and let go where training begins or weights move.
Writing through a parameter's `.data` is what nobody can see: call `train()` and `eval()` after it.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional


def folds(projection: nn.Module, behind: nn.Module) -> bool:
    """Whether the two may be read as one: plain weights, on this device for good, that nobody watches or wraps."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(projection) is not nn.Linear:
        return False
    modules = (projection, behind)
    if any(x._forward_hooks or x._forward_pre_hooks or "forward" in vars(x) for x in modules):
        return False
    weights = [weight for module in modules for weight in module.parameters()]
    return all(type(x) is nn.Parameter and not (x.is_meta or x.is_inference()) for x in weights)


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
    """The weight and bias of both; the bias goes through the map as one more column."""
    columns = [projection.weight] if projection.bias is None else [projection.weight, projection.bias.unsqueeze(1)]
    by_head = torch.cat(columns, dim=1).detach().unflatten(0, (-1, size)).transpose(1, 2)  # (heads, columns, size)
    mapped = behind(by_head).transpose(1, 2).flatten(0, 1)
    if projection.bias is None:
        return mapped, None
    return mapped[:, :-1].contiguous(), mapped[:, -1].contiguous()
