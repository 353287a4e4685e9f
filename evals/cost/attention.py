"""What one attention layer costs, measured: it runs on the meta device, where tensors have shapes and no memory.

Multiplications are those of matrix products, as PyTorch's own counter sees them in eager attention and as the papers
count them: every query meets every key, whatever a causal mask, a window or a head that is off would let a fast
backend skip. Norms, positions, softmax and other work on single numbers are left out, and so are biases. A product
with one row or one feature that PyTorch does by single numbers counts as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

FLOPS = 2
"""Per multiplication, with the addition after it."""


@dataclass(frozen=True)
class AttentionCost:
    """Multiplications of one attention layer for texts of one length, and what its cache keeps."""

    forward: int
    """For all tokens of a text at once."""
    decode: int
    """For the last token, those before being cached."""
    cached_numbers: int
    """Of one token."""


def attention_cost(attention: Any, config: Any, length: int) -> AttentionCost:
    """Measure an attention module on the meta device, stock or ours."""

    def run(tokens: int, cache: DynamicCache) -> None:
        dtype = attention.q_proj.weight.dtype
        hidden = torch.empty(1, tokens, attention.q_proj.in_features, dtype=dtype, device="meta")
        angles = torch.empty(1, tokens, attention.head_dim, dtype=dtype, device="meta")
        attention(hidden, position_embeddings=(angles, angles), attention_mask=None, past_key_values=cache)

    one, past = DynamicCache(config=config), DynamicCache(config=config)
    run(1, one)
    stored = one.layers[attention.layer_idx]
    if length > 1:
        run(length - 1, past)
    return AttentionCost(
        forward=multiplications(lambda: run(length, DynamicCache(config=config))),
        decode=multiplications(lambda: run(1, past)),
        cached_numbers=stored.keys.numel() + stored.values.numel(),
    )


def multiplications(call: Callable[[], Any]) -> int:
    """Those of the matrix products in a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) // FLOPS
