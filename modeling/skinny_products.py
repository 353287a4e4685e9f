"""A tall matrix times a few rows, by the faster of the libraries that torch brings for a processor.

`torch.mm` calls MKL, which on processors of other makers leaves half of what they can do. oneDNN makes its kernels for
the processor that it finds; torch has it for compiled graphs, and for float32 there alone. What it has no kernel for,
as rows with gaps between them, takes it a hundred times as long.
"""

from functools import cache

import torch
from torch.nn import functional


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` of matrices, as `functional.linear` has it."""
    if x.dtype != torch.float32 or torch.is_grad_enabled() or not (_dense(x, weight) and _has_kernels()):
        return functional.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _dense(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous() and (weight.is_contiguous() or weight.t().is_contiguous())


@cache
def _has_kernels() -> bool:
    capable = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return capable and hasattr(torch.ops.mkldnn, "_linear_pointwise")
