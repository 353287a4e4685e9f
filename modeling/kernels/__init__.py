"""Faster functions for the registered attention backends; installed with crosshead, never part of a published model.

`register_kernels` runs when crosshead is imported. The functions for CPUs, and that of `talking` by Triton, take the
place of the plain ones. That of `mixture` by Triton has a name of its own: an H200 gains by it only with long texts.
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
    """Register each function under its name, in the place of one that a published model has registered.

    Attention layers of encoders also get a forward that skips projections.
    """
    for name, function in KERNELS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    EncoderAttention.forward = skipping_forward(EncoderAttention.forward)  # type: ignore[method-assign]
