"""Decides whether the Triton kernels run for a tensor; otherwise the plain PyTorch functions run.

The kernels are tested against float64 in Triton's interpreter and on an H200 (`tests/gpu_check.py`).

Triton is optional: import the `*_triton.py` files only inside functions, after `runs_triton` returned True.
"""

from importlib.util import find_spec

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of q, k and v; the kernels accumulate in float32."""
MAX_FEATURES = 256
"""Maximum head size: tiles of larger heads do not fit in shared memory."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether the tensor is on a CUDA GPU in a supported dtype, and Triton is installed."""
    return x.device.type == "cuda" and x.dtype in DTYPES and find_spec("triton") is not None


def product_precision(dtype: torch.dtype) -> str:
    """Return `input_precision` for `tl.dot` of float32 operands: torch's own setting; TF32 if q, k and v are half."""
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"
