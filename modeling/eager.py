"""Attention that materialises its weights."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .numerics import apply_mask


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, groups, S, d) -> (B, heads, S, d): head `i` reads group `i * groups // heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention_logits(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """(B, H, T, S), before any mask."""
    return torch.matmul(query, repeat_heads(key, query.shape[1]).transpose(2, 3)) * scaling


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """(B, H, T, S), in the dtype of the queries."""
    logits = apply_mask(attention_logits(query, key, scaling), mask)
    return functional.softmax(logits, dim=-1).to(query.dtype)


def weigh_values(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Outputs (B, T, H, d) from weights (B, H, T, S) and grouped values."""
    return torch.matmul(weights, repeat_heads(value, weights.shape[1])).transpose(1, 2).contiguous()


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's eager attention, bit for bit, but float64 stays float64 and a row without keys stays finite."""
    weights = attention_weights(query, key, attention_mask, scaling)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return weigh_values(weights, value), weights
