"""Faster attention functions for CPUs and GPUs; installed with crosshead, never part of a published model.

`register_kernels` runs when crosshead is imported. The CPU functions and the Triton function of `talking` replace the
plain PyTorch functions under the same names. The Triton function of `mixture` has its own name,
"crosshead_mixture_triton", because on an H200 it is faster only for long sequences.
"""

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..encoder import EncoderAttention
from .cpu_explicit import explicit_attention
from .cpu_mixture import mixture_attention
from .cpu_mixture_layer import skipping_forward
from .triton_backends import mixture_triton_attention, talking_triton_attention

KERNELS: dict[str, Callable[..., Any]] = {
    "crosshead_explicit": explicit_attention,
    "crosshead_mixture": mixture_attention,
    "crosshead_mixture_triton": mixture_triton_attention,
    "crosshead_talking": talking_triton_attention,
    "crosshead_talking_triton": talking_triton_attention,
}


def register_kernels() -> None:
    """Register each attention function under its name; it replaces a function that is registered under that name.

    Also wrap the forward of encoder attention layers, so that it skips the projections of heads with zero gates.
    """
    for name, function in KERNELS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    EncoderAttention.forward = skipping_forward(EncoderAttention.forward)  # type: ignore[method-assign]
