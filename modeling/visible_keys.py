"""Which keys the queries of a sequence see: what a block of queries must meet, and what is hidden in it."""

import torch

from .quick_products import round_whole

STRIPE = 64
"""Neighbouring rows of a mask whose keys are looked up together."""
FAR = 1e30
"""A score this low for each step into the future has no weight in any number format that is used here."""


class VisibleKeys:
    """The keys that each token sees: those of a mask (B, T, S), else all, or all up to its own."""

    def __init__(self, mask: torch.Tensor | None, causal: bool, keys: int, unit: int | None = None) -> None:
        """With a unit, spans are of as round a number of units as there are keys for."""
        self.mask, self.unit = mask, unit
        self.spans = [] if mask is None else [_spans(of_sequence) for of_sequence in mask]
        self.causal, self.keys = causal, keys
        self.places = torch.arange(keys, dtype=torch.float32)

    def span(self, sequence: int, first: int, last: int) -> slice:
        """All that the tokens from `first` to `last` see lies in here, and little else."""
        if self.mask is None:
            start, stop = 0, min(last + 1, self.keys) if self.causal else self.keys
        else:
            spans = self.spans[sequence][first // STRIPE : last // STRIPE + 1]
            start, stop = min(start for start, _ in spans), max(stop for _, stop in spans)
        if self.unit is not None:
            size = round_whole(-(-(stop - start) // self.unit)) * self.unit
            stop = min(start + size, self.keys)
        return slice(start, stop)

    def hide(self, scores: torch.Tensor, sequence: int, tokens: torch.Tensor, first: int, keys: slice) -> None:
        """Take out of the scores of some tokens, the first of which is given, and a span of keys what is not seen."""
        if self.mask is not None:
            seen = self.mask[sequence, :, keys].index_select(0, tokens)
            scores.masked_fill_(seen.logical_not_(), -torch.inf)
        elif (behind := self.behind(tokens, first, keys)) is not None:
            scores[:, first + 1 :].add_(behind)

    def behind(self, tokens: torch.Tensor, first: int, keys: slice) -> torch.Tensor | None:
        """Without a mask, what to add to the scores of keys behind the first token; None where all see all."""
        if not self.causal or first + 1 >= keys.stop:
            return None
        return (tokens.unsqueeze(1) - self.places[first + 1 : keys.stop]).clamp_(max=0).mul_(FAR)


def _spans(mask: torch.Tensor) -> list[tuple[int, int]]:
    """From where to where each stripe of tokens sees keys, by a mask (T, S); an empty span reaches backwards."""
    found = []
    for stripe in mask.split(STRIPE):
        seen = stripe.any(0).nonzero()
        found.append((int(seen[0]), int(seen[-1]) + 1) if len(seen) else (mask.shape[1], 0))
    return found
