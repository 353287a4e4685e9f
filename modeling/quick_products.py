"""Products of matrices, by the faster of the libraries that torch brings for a processor.

`torch.mm` calls MKL, which on other makers' processors with AVX-512 leaves half of what they can do. oneDNN makes its
kernels for the processor that it finds; torch has it for compiled graphs, and for float32 there alone. What it has no
kernel for, as rows with gaps between them, takes it a hundred times as long. Without AVX-512 MKL is the faster one,
but for a few rows with many, as in decoding.

A kernel is made for each shape, takes a millisecond to make and half a megabyte to keep, and a thousand are kept. So
only matrices of round sizes go there, of which there are eight from one power of two to the next.
"""

from functools import cache

import torch
from torch.nn import functional

MULTIPLIES = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether oneDNN does at all; whether that is quick depends on the processor."""
DIGITS = 4
"""Binary ones of a round size, zeros behind them apart."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` of matrices, as `functional.linear` has it; rows of `x` beyond a round number come from torch."""
    if torch.is_grad_enabled() or not has_kernels(x) or not _fit(x, weight):
        return functional.linear(x, weight)
    rows = round_part(len(x))
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x[:rows], weight, None, "none", [], "")
    return found if rows == len(x) else torch.cat([found, functional.linear(x[rows:], weight)])


def round_part(size: int) -> int:
    """The largest round size that is no larger."""
    behind = max(0, size.bit_length() - DIGITS)
    return size >> behind << behind


def round_whole(size: int) -> int:
    """The smallest round size that is no smaller."""
    part = round_part(size)
    return part if part == size else part + (1 << (size.bit_length() - DIGITS))


def has_kernels(x: torch.Tensor) -> bool:
    """Whether oneDNN multiplies such numbers, in such a place."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and _has_kernels()


def _fit(x: torch.Tensor, weight: torch.Tensor) -> bool:
    dense = x.is_contiguous() and (weight.is_contiguous() or weight.t().is_contiguous())
    return dense and len(x) > 0 and all(size == round_part(size) > 0 for size in weight.shape)


def is_quicker(x: torch.Tensor) -> bool:
    """Whether oneDNN is also the faster one where both matrices are large."""
    return has_kernels(x) and _is_quicker()


@cache
def _has_kernels() -> bool:
    return MULTIPLIES and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@cache
def _is_quicker() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
