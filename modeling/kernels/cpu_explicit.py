"""Split-K attention on CPUs: few queries attend to the component heads of `explicit` as one wide head.

The flash kernel runs one head per thread, so one wide head would use one thread. The keys are split into one part per
thread, each part is passed as a head, and the outputs of the parts are merged by their log-sum-exp.
"""

from typing import Any

import torch
from torch import nn

from ..backends import is_plain_sdpa
from ..mechanisms.explicit import explicit_attention_forward, fold_map, unfold_outputs
from ..ops import wide_heads
from .cpu import MASKED_LOGIT, additive, flash_kernel, flash_supports, is_tracing

MIN_KEYS = 256
"""Minimum keys per part. Measured on 2 cores of an AMD EPYC (AVX2), float32, 32 query heads, 4 components of 128."""


def explicit_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `explicit_attention_forward` returns; split the keys if there are fewer sequences than threads."""
    # The compiler cannot trace the number of threads.
    if is_tracing() or part_count(key) == 1 or not explicit_eligible(query, key, value, **options):
        return explicit_attention_forward(module, query, key, value, attention_mask, scaling, **options)
    maps = options["key_map"], options["value_map"]
    batch, heads, tokens, _ = query.shape
    mask = None if attention_mask is None else row_mask(attention_mask, heads, query.dtype)
    rows = fold_map(query, maps[0]).flatten(1, 2)
    output = attend_in_parts(rows, wide_heads(key)[:, 0], wide_heads(value)[:, 0], mask, scaling)
    return unfold_outputs(output.view(batch, heads, tokens, -1), maps[1], tokens).transpose(1, 2), None


def explicit_eligible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    key_map: torch.Tensor | None = None,
    value_map: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    implementation: str | None = "sdpa",
    **options: Any,
) -> bool:
    """Whether the keys can be split: keys and values both have component heads, and no tensor needs a gradient.

    Each head must combine all components; with `groups` there would be several wide heads.
    """
    if key_map is None or value_map is None or key_scale is not None or key.shape != value.shape:
        return False
    if key_map.shape[1] * query.shape[3] != key.shape[1] * key.shape[3]:
        return False
    if not flash_supports(dropout, query, key, value) or not is_plain_sdpa(implementation) or flash_kernel() is None:
        return False
    tensors = query, key, value, key_map, value_map
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def part_count(keys: torch.Tensor) -> int:
    """Return the number of parts for keys (B, n, S, d); 1 if there are at least as many sequences as threads."""
    return max(1, min(-(-torch.get_num_threads() // keys.shape[0]), keys.shape[2] // MIN_KEYS))


def row_mask(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask (B or 1, 1 or H, T, S) as an additive mask of the rows of one head (B or 1, 1 or H * T, S)."""
    added = additive(mask, dtype) if mask.dtype == torch.bool else mask.to(dtype).clamp_min(MASKED_LOGIT)
    return added[:, 0] if added.shape[1:3] == (1, 1) else added.expand(-1, heads, -1, -1).flatten(1, 2)


def attend_in_parts(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the attention outputs (B, R, n) of query rows (B, R, n) over keys and values (B, S, n); no autograd."""
    attend: Any = flash_kernel()
    count, length = part_count(keys.unsqueeze(1)), keys.shape[1]
    divisible, results = length - length % count, []
    for span, parts in ((slice(divisible), count), (slice(divisible, length), 1)):
        if span.start == length:
            continue
        q = rows.unsqueeze(1).expand(-1, parts, -1, -1)
        k, v = (x[:, span].unflatten(1, (parts, -1)) for x in (keys, values))
        added = None if mask is None else mask[..., span].unflatten(2, (parts, -1)).transpose(1, 2)
        results.append(attend(q, k, v, attn_mask=added, scale=scaling))
    outputs, logsumexp = (torch.cat(tensors, dim=1) for tensors in zip(*results, strict=True))
    return (outputs * torch.softmax(logsumexp, dim=1).unsqueeze(-1)).sum(1)
