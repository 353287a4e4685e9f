"""Tensor operations that mechanisms share. Softmax and norms run in float32 at least; float64 stays float64."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the widened dtype, used by softmax and norms: float64 for float64 inputs, float32 for all others."""
    return dtype if dtype == torch.float64 else torch.float32


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return `1 / rms(x)` over the last dimension, which is kept with size 1, in the widened dtype."""
    return torch.rsqrt(x.to(widened(x.dtype)).pow(2).mean(-1, keepdim=True) + eps)


def rms_normalised(x: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x)` over the last dimension, in the dtype of `x`."""
    if not torch.is_grad_enabled():  # one fused call; on a GPU it has no second derivative
        return functional.rms_norm(x, x.shape[-1:], eps=eps)
    return (x.to(widened(x.dtype)) * inverse_rms(x, eps)).to(x.dtype)


class HeadRMSNorm(nn.RMSNorm):
    """RMSNorm over the features of each head, one weight for all heads; unlike stock norms, it keeps float64."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return `weight * x / rms(x)`."""
        return self.weight * rms_normalised(x, self.eps)


def head_map_init(weight: Tensor) -> Tensor:
    """Return the initial map across heads for a weight (rows, columns), in float64: the identity if it is square.

    With more rows, neighbouring rows copy one column; with fewer, each row averages neighbouring columns.
    """
    (rows, columns), larger, smaller = weight.shape, max(weight.shape), min(weight.shape)
    member_of = torch.arange(larger, device=weight.device) * smaller // larger
    membership = functional.one_hot(member_of, smaller).to(torch.float64)
    return membership if rows >= columns else membership.T / membership.sum(0).unsqueeze(-1)


def apply_mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask to logits (B, H, T, S): additive, or boolean with True for visible keys; in the widened dtype."""
    # In half precision, the lowest finite number plus a logit would overflow to minus infinity.
    logits = logits.to(widened(logits.dtype))
    if mask is None:
        return logits
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return logits + mask


def add_position_bias(mask: Tensor | None, bias: Tensor, causal: bool) -> Tensor:
    """Return the bias (B or 1, H, T, S) with the mask added or, if that is None and `causal`, a causal mask."""
    if mask is None and causal and bias.shape[2] > 1:
        mask = causal_mask(bias.shape[2], bias.shape[3], bias.device)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a bool mask (queries, keys): query `t` sees keys up to `t`, as in SDPA with `is_causal=True`."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def wide_heads(x: Tensor) -> Tensor:
    """Join heads: (B, heads, S, d) -> (B, 1, S, heads * d); a view if the heads of a token are adjacent in memory."""
    batch, heads, tokens, size = x.shape
    return x.transpose(1, 2).reshape(batch, 1, tokens, heads * size)


def split_heads(x: Tensor, size: int) -> Tensor:
    """Split features into heads: (B, S, heads * size) or (B, 1, S, heads * size) -> (B, heads, S, size)."""
    return x.view(x.shape[0], x.shape[-2], x.shape[-1] // size, size).transpose(1, 2)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat grouped heads: (B, groups, S, d) -> (B, heads, S, d); head `i` reads group `i * groups // heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention_logits(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return scaled attention logits (B, H, T, S), before any mask."""
    return torch.matmul(query, repeat_heads(key, query.shape[1]).transpose(2, 3)) * scaling


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return attention weights (B, H, T, S) in the dtype of the queries."""
    return functional.softmax(apply_mask(attention_logits(query, key, scaling), mask), dim=-1).to(query.dtype)


def weigh_values(weights: Tensor, value: Tensor) -> Tensor:
    """Return outputs (B, T, H, d) from weights (B, H, T, S) and values (B, groups, S, d)."""
    return torch.matmul(weights, repeat_heads(value, weights.shape[1])).transpose(1, 2).contiguous()


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Stock eager attention, bit for bit, except that float64 is kept and fully masked rows stay finite."""
    weights = attention_weights(query, key, attention_mask, scaling)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return weigh_values(weights, value), weights


def local_heads(per_head: Tensor, heads: int) -> Tensor:
    """Return the part of (..., all heads) for the `heads` heads that this process has under tensor parallelism."""
    parts = per_head.shape[-1] // heads
    return per_head if parts == 1 else per_head.narrow(-1, torch.distributed.get_rank() % parts * heads, heads)
