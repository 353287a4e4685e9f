"""Positions on queries and keys: as stock models turn them, and for a single token both in one go."""

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both (B, heads, T, d), turned by their tokens' angles (B, T, d); the same bits either way.

    What a single token costs are the calls, and heads of queries and keys are turned alike.
    """
    if query.shape[2] != 1 or query.dtype != key.dtype:
        return apply_rotary_pos_emb(query, key, cos, sin)
    both = torch.cat([query, key], dim=1)
    both = both * cos.unsqueeze(1) + rotate_half(both) * sin.unsqueeze(1)
    return both[:, : query.shape[1]], both[:, query.shape[1] :]
