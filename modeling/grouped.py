"""Grouped heads: which key/value head a query head reads."""

import torch


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, groups, S, d) -> (B, heads, S, d): head `i` is group `i * groups // heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
