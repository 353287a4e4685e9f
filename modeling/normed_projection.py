"""An RMSNorm of each head and the projection behind it as one step, which keeps what came in and nothing in between.

The backward pass makes the normed heads again, for a few multiplications each. Numbers are those of the two modules.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .numerics import inverse_rms
from .readable_weights import readable
from .traced import traced


def keeps_less(projection: nn.Module, *norm: nn.Module) -> bool:
    """Whether the two had better be one step, here and now; a norm without weight needs no module."""
    if not torch.is_grad_enabled() or traced() or type(projection) is not nn.Linear:
        return False
    return readable(projection, *norm)


def normed_projection(
    heads: torch.Tensor, scale: torch.Tensor | float, eps: float, projection: nn.Linear
) -> torch.Tensor:
    """Hidden states (B, T, D) of heads (B, T, H, d), normed and then scaled by (d) numbers or by one."""
    projected: torch.Tensor = NormedProjection.apply(heads, scale, eps, projection.weight, projection.bias)
    return projected


class NormedProjection(torch.autograd.Function):
    """`(scale * heads / rms(heads)) W^T + bias`."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: torch.Tensor,
        scale: torch.Tensor | float,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states."""
        inverse = inverse_rms(heads, eps)
        learnt = [scale] if isinstance(scale, torch.Tensor) else []
        ctx.save_for_backward(heads, inverse, weight, *learnt)
        ctx.fixed = scale if not learnt else None
        normed = (heads.to(inverse.dtype) * inverse).to(heads.dtype)
        return functional.linear((scale * normed).flatten(2), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """To the heads, to their scale, and to the projection."""
        heads, inverse, weight, *learnt = ctx.saved_tensors
        scale = learnt[0] if learnt else ctx.fixed
        to_heads = to_scale = to_weight = to_bias = None
        normed = heads.to(inverse.dtype) * inverse
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            to_scaled = (gradient @ weight.to(gradient.dtype)).view(heads.shape).to(inverse.dtype)
            to_scale = (to_scaled * normed).sum((0, 1, 2)).to(scale.dtype) if learnt else None
            to_normed = to_scaled * scale
            along = (to_normed * normed).mean(-1, keepdim=True)
            to_heads = (inverse * (to_normed - along * normed)).to(heads.dtype)
        if ctx.needs_input_grad[3]:
            scaled = (scale * normed.to(heads.dtype)).flatten(2).to(gradient.dtype)
            to_weight = (gradient.flatten(0, 1).t() @ scaled.flatten(0, 1)).to(weight.dtype)
        if ctx.needs_input_grad[4]:
            to_bias = gradient.sum((0, 1))
        return to_heads, to_scale, None, to_weight, to_bias
