"""Whether Triton's kernels run on a tensor. Where they do not, the plain functions do.

They agree with float64 in Triton's interpreter and on an H200 (`tests/gpu_check.py`).

Files of kernels, `*_triton.py`, are imported behind this question alone, in functions: Triton is optional.
"""

from importlib.util import find_spec

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels take; they add in float32."""
MOST_FEATURES = 256
"""Of a head: more do not fit in the memory of a GPU's processors."""


def runs_triton(x: torch.Tensor) -> bool:
    """On a GPU, with Triton installed."""
    return x.device.type == "cuda" and x.dtype in DTYPES and find_spec("triton") is not None


def product_precision(dtype: torch.dtype) -> str:
    """How float32 factors are multiplied: as torch's own products are; beside half precision, TF32 is enough."""
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"
