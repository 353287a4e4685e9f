"""A projection and the linear map behind each of its heads as one product.

In training the product is made for each call, and again in the backward pass, as it is not kept: it is as large as the
projection's weight, and little work beside what is projected.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def mapped_projection(projection: nn.Linear, behind: nn.Module, size: int, hidden: torch.Tensor) -> torch.Tensor:
    """Heads of `size` features beside each other, projected and mapped, with gradients to all of it."""
    turned = head_map(behind, size, projection.weight)
    mapped: torch.Tensor = MappedProjection.apply(hidden, turned, projection.weight, projection.bias)
    return mapped


def precise_product(projection: nn.Linear, behind: nn.Module, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of both, by float64 where that is to be had, that the same weights give the same bits."""
    weight, bias = projection.weight, projection.bias
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    return _product(head_map(behind, size, weight).to(wide), weight, bias)


def head_map(behind: nn.Module, size: int, weight: torch.Tensor) -> torch.Tensor:
    """What a module does to one head, as a matrix (size, size) that comes before the head's rows of a weight."""
    with torch.autocast(weight.device.type, enabled=False):
        dtype = next(behind.parameters(), weight).dtype  # under autocast the two may differ
        matrix: torch.Tensor = behind(torch.eye(size, dtype=dtype, device=weight.device))
    return matrix.T


class MappedProjection(torch.autograd.Function):
    """`hidden (M W)^T + M bias`, the map `M` (d, d) before the rows of each head."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, turned: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Heads (..., heads * d)."""
        ctx.save_for_backward(hidden, turned, weight, bias)
        return functional.linear(hidden, *_product(turned, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """To what is projected, to the map, and to the projection."""
        hidden, turned, weight, bias = ctx.saved_tensors
        to_hidden = to_bias = None
        if ctx.needs_input_grad[0]:
            to_hidden = (gradient @ _product(turned, weight, None)[0].to(gradient.dtype)).to(hidden.dtype)
        rows = gradient.flatten(0, -2)
        to_turned, to_weight = _through_map(rows.t() @ hidden.flatten(0, -2).to(rows.dtype), turned, weight)
        if bias is not None:
            more, to_bias = _through_map(rows.sum(0).unsqueeze(1), turned, bias.unsqueeze(1))
            to_turned, to_bias = to_turned + more, to_bias.squeeze(1)
        return to_hidden, to_turned, to_weight, to_bias


def _product(
    turned: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of a projection, with the map applied to each head."""
    with torch.autocast(weight.device.type, enabled=False):
        mapped = (turned @ _by_head(weight, turned)).flatten(0, 1).to(weight.dtype)
        if bias is None:
            return mapped, None
        return mapped, (turned @ _by_head(bias.unsqueeze(1), turned)).flatten().to(bias.dtype)


def _through_map(gradient: torch.Tensor, turned: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the map and of what it was applied to, (heads * d, columns), from that of the product."""
    to_product = _by_head(gradient, turned)
    to_turned = torch.einsum("hij,hkj->ik", to_product, _by_head(x, turned))
    return to_turned, (turned.t() @ to_product).flatten(0, 1).to(x.dtype)


def _by_head(x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """(heads * d, columns) -> (heads, d, columns), in the dtype of the map."""
    return x.to(turned.dtype).unflatten(0, (-1, turned.shape[0]))
