"""Attention functions that call the Triton kernels, or the plain PyTorch function where a kernel does not apply."""

from typing import Any

import torch
from torch import nn

from ..mechanisms.mixture import mixture_attention_forward
from ..mechanisms.talking import talking_attention_forward, under_torch_func
from .triton_support import MAX_FEATURES, runs_triton

Outcome = tuple[torch.Tensor, torch.Tensor | None]


def mixture_eligible(query: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> bool:
    """Whether the `mixture` kernels support the call: at most one mask for all heads, no gradients in decoding."""
    if dropout or under_torch_func() or not runs_triton(query) or query.shape[3] > MAX_FEATURES:
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return False
    return query.shape[2] > 1 or not torch.is_grad_enabled()


def mixture_triton_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    gates: torch.Tensor | None = None,
    **kwargs: Any,
) -> Outcome:
    """Return outputs (B, T, H, d), computed only for heads with nonzero gates (B, T, H), and None for the weights."""
    if gates is None or not mixture_eligible(query, attention_mask, dropout):
        options = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, "gates": gates, **kwargs}
        return mixture_attention_forward(module, query, key, value, attention_mask, **options)
    mask = None if attention_mask is None else attention_mask[:, 0]
    if query.shape[2] == 1:
        from .routed_decode_triton import decode_selected

        return decode_selected(query, key, value, gates != 0, mask, scaling), None
    from .routed_triton import attend_selected

    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    return attend_selected(query, key, value, gates != 0, mask, scaling, causal), None


def talking_triton_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Outcome:
    """Return talking-heads outputs (B, T, heads, d); on a GPU, Triton runs the forward pass of two or more queries."""
    if runs_triton(query):
        from .talking_triton import talking_operator

        kwargs["operator"] = talking_operator
    return talking_attention_forward(module, query, key, value, attention_mask, **kwargs)
