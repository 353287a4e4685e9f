"""Attention on CPUs for `mixture`: skips the (query, head) pairs whose gate is zero.

The queries that select a routed head are gathered into a list per head, in token order; the lists are padded to equal
length. The flash kernel processes all lists together, in pieces: a rectangle of keys that every row from a block on
sees needs no mask, the block's last keys need one. The outputs of the pieces are merged by their log-sum-exp.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..ops import repeat_heads
from .cpu import MASKED_LOGIT, additive, flash_kernel, flash_supports

# Measured on 2 cores of an AMD EPYC (AVX2), float32, 16 heads of 64, 4 of them shared.
BLOCK_ROWS = 192
MIN_QUERIES = 1024
MAX_FRACTION = 0.7
"""Maximum fraction of (query, head) pairs to compute, with every list padded to the longest."""


def mixture_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    gates: torch.Tensor | None = None,
    shared_heads: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return outputs (B, T, H, d) that are zero where a gate (B, T, H) is zero; stock SDPA if skipping is not faster.

    The first `shared_heads` heads are computed for every token.
    """
    if gates is None or not mixture_eligible(query, key, value, attention_mask, dropout, gates, shared_heads, kwargs):
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    output = query.new_zeros(gates.shape + query.shape[-1:])
    if shared_heads:
        q, k, v = (x[:, :shared_heads] for x in (query, key, value))
        shared = functional.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=causal, scale=scaling)
        output[:, :, :shared_heads] = shared.transpose(1, 2)
    selected = gates[..., shared_heads:].transpose(1, 2) != 0
    q, k, v = (x[:, shared_heads:] for x in (query, key, value))
    routed = output[:, :, shared_heads:].transpose(1, 2)
    routed_heads(q, k, v, selected, attention_mask, causal, scaling, routed)
    return output, None


def mixture_eligible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    gates: torch.Tensor,
    shared_heads: int,
    options: dict[str, Any],
) -> bool:
    """Whether the call is supported, and long and sparse enough for skipping to be faster."""
    batch, heads, tokens, size = query.shape
    if not flash_supports(dropout, query, key, value) or flash_kernel() is None or flash_kernel("_backward") is None:
        return False
    if (
        tokens < MIN_QUERIES
        or shared_heads >= heads
        or value.shape[-1] != size
        or gates.shape != (batch, tokens, heads)
    ):
        return False
    if options.get("position_bias") is not None or options.get("cache") is not None:
        return False
    mask_shape = (1, tokens, key.shape[2])
    if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape[1:] != mask_shape):
        return False
    longest = int(gates[..., shared_heads:].count_nonzero(1).max())
    return shared_heads * tokens + (heads - shared_heads) * longest <= MAX_FRACTION * heads * tokens


def routed_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selected: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    output: torch.Tensor,
) -> None:
    """Add the attention of the `selected` (B, n, T) queries to `output` (B, n, T, d); all tensors have n heads."""
    ends = visible_ends(query, key, mask, causal).unsqueeze(1).expand_as(selected)
    selected = selected & (ends > 0)
    tokens, valid = row_lists(selected)
    if not tokens.shape[-1]:
        return
    sequence, head = (torch.arange(size, device=query.device) for size in query.shape[:2])
    index = sequence.view(-1, 1, 1), head.view(-1, 1), tokens
    rows = Rows(tokens, ends.gather(-1, tokens), mask)
    result: torch.Tensor = PieceAttention.apply(query[index], key, value, rows, scaling)
    output.index_put_(index, result * valid.unsqueeze(-1), accumulate=True)


def visible_ends(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Return, per query (B or 1, T), the number of keys up to and including its last visible key."""
    if mask is not None:
        hidden_last = mask[:, 0].flip(-1).to(torch.uint8).argmax(-1)
        return (key.shape[2] - hidden_last) * mask[:, 0].any(-1)
    ends = torch.arange(1, query.shape[2] + 1, device=query.device).clamp_max(key.shape[2])
    return (ends if causal else torch.full_like(ends, key.shape[2])).unsqueeze(0)


def row_lists(selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each head's selected tokens in order (B, n, L), padded with repeats, and a mask, False for padding."""
    counts = selected.sum(-1, keepdim=True)
    longest = int(counts.max())
    counts = counts.where(counts > 0, selected.shape[-1])  # padding of an empty list is spread over all tokens
    ranks = torch.arange(longest, device=counts.device) * counts // max(longest, 1)
    tokens = torch.argsort(~selected, dim=-1, stable=True).gather(-1, ranks)
    is_new = torch.diff(ranks, dim=-1, prepend=torch.full_like(counts, -1)) > 0
    return tokens, is_new & selected.gather(-1, tokens)


@dataclass(frozen=True)
class Rows:
    """The selected queries of all heads (B, n, L): token indices, and one past the last visible key (`ends`)."""

    tokens: torch.Tensor
    ends: torch.Tensor
    mask: torch.Tensor | None

    def pieces(self) -> Iterator[tuple[slice, slice, bool]]:
        """Yield (rows, keys, is masked) per kernel call; a masked piece hides no row completely, except padding."""
        done = 0
        for start in range(0, self.ends.shape[-1], BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            minimum, maximum = (int(end) for end in self.ends[..., rows].aminmax())
            unmasked = 0 if self.mask is not None else maximum if minimum == maximum else minimum - 1
            if unmasked > done:
                yield slice(start, None), slice(done, unmasked), False
                done = unmasked
            if maximum > done:
                yield rows, slice(done, maximum), True

    def added(self, rows: slice, keys: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask of a piece (B, n, rows, keys)."""
        if self.mask is not None:
            sequence = torch.arange(len(self.tokens), device=self.mask.device).view(-1, 1, 1) % len(self.mask)
            return additive(self.mask[sequence, 0, self.tokens[..., rows], keys], dtype)
        # Row `i` of this view hides the last `i` keys; copying such rows is faster than comparing indices.
        size, visible = keys.stop - keys.start, self.ends[..., rows] - keys.start
        steps = torch.zeros(2 * size, dtype=dtype, device=visible.device)
        steps[size:] = MASKED_LOGIT
        return steps.unfold(0, size, 1).index_select(0, (size - visible).flatten()).view(*visible.shape, size)


class PieceAttention(torch.autograd.Function):
    """Attention of the listed queries (B, n, L, d) to keys and values (B, n, S, d), piece by piece."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scaling: float
    ) -> torch.Tensor:
        """Return the outputs (B, n, L, d); each piece is merged into the running output by its log-sum-exp."""
        attend: Any = flash_kernel()
        output, logsumexp = torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf)
        for part, keys, masked in rows.pieces():
            added = rows.added(part, keys, query.dtype) if masked else None
            q, k, v = query[:, :, part], key[:, :, keys], value[:, :, keys]
            piece, piece_lse = attend(q, k, v, attn_mask=added, scale=scaling)
            running_lse = logsumexp[:, :, part]
            output[:, :, part].lerp_(piece, torch.sigmoid(piece_lse - running_lse).unsqueeze(-1))
            running_lse.copy_(torch.logaddexp(running_lse, piece_lse))
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.rows, ctx.scaling = rows, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, summed over the pieces; each piece uses the log-sum-exp over all keys."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        differentiate: Any = flash_kernel("_backward")
        totals = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for part, keys, masked in ctx.rows.pieces():
            added = ctx.rows.added(part, keys, query.dtype) if masked else None
            grad, q, o, lse = (x[:, :, part] for x in (gradient, query, output, logsumexp))
            k, v = key[:, :, keys], value[:, :, keys]
            grads = differentiate(grad, q, k, v, o, lse, 0.0, False, attn_mask=added, scale=ctx.scaling)
            for total, span, piece in zip(totals, (part, keys, keys), grads, strict=True):
                total[:, :, span] += piece
        return *totals, None, None
