"""Whether Triton's kernels run on a tensor. Where they do not, the plain ways do the same.

They agree with the plain ways in Triton's interpreter, compile for an H100, and have yet to run on a GPU: until
`tests/gpu_speed.py` has passed on one, they wait to be asked for, by the environment variable CROSSHEAD_TRITON=1.

Files of kernels, `*_triton.py`, are imported behind this question alone, in functions: a model loads without Triton.
"""

import os
from importlib.util import find_spec

import torch

WANTED = os.environ.get("CROSSHEAD_TRITON") == "1" and find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels take; they add in float32."""
MOST_FEATURES = 256
"""Of a head: more do not fit in the memory of a GPU's processors."""


def runs_triton(x: torch.Tensor) -> bool:
    """On a GPU, with Triton, where it was asked for."""
    return WANTED and x.device.type == "cuda" and x.dtype in DTYPES


def product_precision(dtype: torch.dtype) -> str:
    """How float32 factors are multiplied: as torch's own products are; beside half precision, TF32 is enough."""
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"
