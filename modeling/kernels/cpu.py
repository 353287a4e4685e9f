"""What crosshead's attention functions for CPUs share: when they may run, and torch's flash kernel."""

from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[..., Any]
HIDDEN = -1e30
"""What is added to the logit of a hidden key: finite, so that a query without keys stays finite."""


def is_tracing() -> bool:
    """Whether torch.compile, torch.export, torch.jit or a `torch.func` transform follows the call."""
    functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or functorch()


def runs_here(query: torch.Tensor, dropout: float, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether a call is a plain one on a CPU: no trace, no autocast, no dropout, no subclass of tensors."""
    if is_tracing() or query.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    return not dropout and query.dtype in dtypes and type(query) is torch.Tensor


def flash_kernel(suffix: str = "") -> Kernel | None:
    """The kernel behind `scaled_dot_product_attention`, which also returns log-sum-exp, or None in another torch."""
    return getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu" + suffix, None)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add from one that is True where a key is visible."""
    return torch.where(visible, torch.zeros((), dtype=dtype), torch.full((), HIDDEN, dtype=dtype))
