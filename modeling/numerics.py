"""Number formats and norms shared by the mechanisms: softmax and RMSNorm never run below float32."""

import torch
from torch import nn


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute softmax and norms in: float32, or float64 where the input is float64."""
    return torch.promote_types(dtype, torch.float32)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`1 / rms(x)` over the last dimension, which is kept with size 1, in the widened dtype."""
    wide = x.to(widened(x.dtype))
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def rms_normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x)` over the last dimension, in the dtype of `x`."""
    return (x.to(widened(x.dtype)) * inverse_rms(x, eps)).to(x.dtype)


class HeadRMSNorm(nn.Module):
    """RMSNorm over the features of one head, with one weight vector shared by all heads.

    The same arithmetic as the norms of the stock backbones, bit for bit, but float64 stays float64.
    """

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`weight * x / rms(x)` over the last dimension."""
        return self.weight * rms_normalised(x, self.eps)

    def extra_repr(self) -> str:
        """Shape and eps, for `print(model)`."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class HeadScaleRMSNorm(HeadRMSNorm):
    """The weight of a `HeadRMSNorm` alone: whoever uses it divides by the root mean square somewhere else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`weight * x`."""
        return self.weight * x


def apply_mask(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention logits (B, H, T, S) under an additive mask, or a boolean one that is True where a key is visible.

    The result is in the widened dtype, so that a fully masked row stays finite in half precision, where the
    smallest number plus a logit overflows to minus infinity.
    """
    wide = logits.to(widened(logits.dtype))
    if mask is None:
        return wide
    if mask.dtype == torch.bool:
        return wide.masked_fill(~mask, torch.finfo(wide.dtype).min)
    return wide + mask
