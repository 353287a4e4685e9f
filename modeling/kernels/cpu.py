"""Helpers of the attention functions for CPUs: eligibility checks, masks, and access to torch's flash kernel."""

from collections.abc import Callable
from typing import Any

import torch

MASKED_LOGIT = -1e30
"""Added to the logits of hidden keys; finite, so that a query that sees no key does not yield NaN."""


def is_tracing() -> bool:
    """True under torch.compile, torch.export, torch.jit.trace or a `torch.func` transform."""
    under_functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return traced or under_functorch()


def flash_supports(dropout: float, *tensors: torch.Tensor) -> bool:
    """Whether the flash kernel accepts the call: CPU tensors of one wide dtype with feature stride 1, no dropout."""
    if is_tracing() or dropout or torch.is_autocast_enabled("cpu"):
        return False
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.float64) and all(
        type(x) is torch.Tensor and x.is_cpu and x.dtype == dtype and x.stride(-1) == 1 and x.numel() for x in tensors
    )


def flash_kernel(suffix: str = "") -> Callable[..., Any] | None:
    """Return the op behind `scaled_dot_product_attention`, which also returns log-sum-exp; None if torch lacks it."""
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu" + suffix, None)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask in `dtype` for a boolean mask that is True where a key is visible."""
    return torch.where(visible, 0.0, MASKED_LOGIT).to(dtype)
