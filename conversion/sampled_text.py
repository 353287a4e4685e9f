"""Text that a model writes by itself: more like what it was trained on than any text that we could bring."""

from collections.abc import Callable
from typing import Any

import torch

from .streamed_model import StreamedModel

SEED = 0


@torch.no_grad()
def sampled_text(
    model: StreamedModel, shape: tuple[int, int], known: int, advance: Callable[[int, int], None]
) -> torch.Tensor:
    """Token ids of sequences (B, T), sampled from the model as it is, each from a random one of `known` tokens on."""
    count, length = shape
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(known, (count, 1), generator=generator)
    cache: Any = None
    with model.whole() as whole:
        for done in range(1, length):
            outputs = whole(tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            chances = outputs.logits[:, -1, :known].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
            advance(done + 1, length)
    return tokens
