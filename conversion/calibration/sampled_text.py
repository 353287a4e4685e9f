"""Calibration text sampled from the model itself, which is nearer to its training data than a text of ours."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .streamed_model import StreamedModel

SEED = 0


class _Reserved(DynamicLayer):
    """The cache of one layer in room for the whole sequence: the library's own is copied at every token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._room = length, torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values (B, h, T, d); returns all there are."""
        if not self.is_initialized:
            batch, heads, _, size = key_states.shape
            self._room = key_states.new_empty(2, batch, heads, self._length, size)
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = self._room[:, :, :, :end]
        return self.keys, self.values


@torch.no_grad()
def sampled_text(
    model: StreamedModel,
    shape: tuple[int, int],
    start: list[int],
    known: int,
    advance: Callable[[int, int], None],
    resident: bool = True,
) -> torch.Tensor:
    """Token ids of sequences (B, T), sampled from the model as it is.

    Each begins with the tokens of `start` and a random one of `known` tokens. Whether the model is `resident` in
    memory decides on the time alone.
    """
    count, length = shape
    generator = torch.Generator().manual_seed(SEED)
    first = torch.randint(known, (count, 1), generator=generator)
    tokens = torch.cat([torch.tensor(start, dtype=torch.long).expand(count, -1), first], dim=1)
    cache = Cache(layers=[_Reserved(length) for _ in range(model.config.num_hidden_layers)])
    cached = 0
    with model.whole(resident) as whole:
        while tokens.shape[1] < length:
            logits = whole(tokens[:, cached:], past_key_values=cache, use_cache=True).logits[:, -1, :known]
            cached = tokens.shape[1]
            tokens = torch.cat([tokens, drawn(logits, torch.rand(count, 1, generator=generator))], dim=1)
            advance(cached + 1, length)
    return tokens


def drawn(logits: torch.Tensor, luck: torch.Tensor) -> torch.Tensor:
    """One token for each row of logits (B, known), by a number in [0, 1) each (B, 1)."""
    reached = logits.float().softmax(-1).cumsum(-1)
    return torch.searchsorted(reached, luck * reached[:, -1:], right=True).clamp_max(logits.shape[-1] - 1)
