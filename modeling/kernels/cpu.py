"""The common part of the attention functions for CPUs: their conditions, and torch's flash kernel."""

from collections.abc import Callable
from typing import Any

import torch

HIDDEN = -1e30
"""Added to the logit of a hidden key: finite, so that a query without keys stays finite."""


def is_tracing() -> bool:
    """Whether torch.compile, torch.export, torch.jit or a `torch.func` transform follows the call."""
    is_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return is_traced or is_transformed()


def runs_here(dropout: float, *tensors: torch.Tensor) -> bool:
    """Whether the flash kernel takes the tensors of a call: plain ones on a CPU, in one wide dtype, without gaps."""
    if is_tracing() or dropout or torch.is_autocast_enabled("cpu"):
        return False
    first = tensors[0].dtype
    return first in (torch.float32, torch.float64) and all(
        type(x) is torch.Tensor and x.is_cpu and x.dtype == first and x.stride(-1) == 1 and x.numel() for x in tensors
    )


def flash_kernel(suffix: str = "") -> Callable[..., Any] | None:
    """The kernel behind `scaled_dot_product_attention`, which also returns log-sum-exp, or None in another torch."""
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu" + suffix, None)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add from one that is True where a key is visible."""
    return torch.where(visible, 0.0, HIDDEN).to(dtype)
