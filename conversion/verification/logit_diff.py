"""Compares the logits of two models on the same text. Both are streamed: neither must fit in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, product

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError

from ..calibration.streamed_model import StreamedModel

POSITIONS = 64
"""Logits are made for so many positions at a time: those of a whole window can be gigabytes."""
Advance = Callable[[int, int], None]
"""Called with the layers done and the layers there are, of both models."""


@dataclass(frozen=True)
class Comparison:
    """What a target predicts differently from its source, on the source's vocabulary."""

    windows: int
    window_length: int
    greatest_logit_difference: float
    mean_logit_difference: float
    """Of the absolute differences."""
    largest_logit: float
    """The source's, by absolute value: what the differences are to be measured by."""
    kl_divergence: float
    """From the source's predictions to the target's, mean over positions, in nats."""
    loss_before: float
    loss_after: float
    perplexity_before: float
    perplexity_after: float
    greedy_agreement: float
    """The share of positions where both hold the same token for the likeliest."""


class _Sums:
    """Running sums over positions, in float64."""

    def __init__(self) -> None:
        self.positions = self.logits = self.labels = self.agreed = 0
        self.greatest = self.largest = self.difference = self.divergence = self.before = self.after = 0.0

    def add(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> None:
        """Logits (n, vocabulary) of n positions, and the tokens that follow: n, or one fewer where the text ends."""
        difference = (source - target).abs()
        self.positions += len(source)
        self.logits += source.numel()
        self.labels += len(labels)
        self.agreed += int((source.argmax(-1) == target.argmax(-1)).sum())
        self.greatest = max(self.greatest, float(difference.max()))
        self.largest = max(self.largest, float(source.abs().max()))
        self.difference += float(difference.sum(dtype=torch.float64))
        before, after = source.double().log_softmax(-1), target.double().log_softmax(-1)
        self.divergence += float((before.exp() * (before - after)).sum())
        self.before += float(functional.nll_loss(before[: len(labels)], labels, reduction="sum"))
        self.after += float(functional.nll_loss(after[: len(labels)], labels, reduction="sum"))


@torch.no_grad()
def compare(
    source: StreamedModel,
    target: StreamedModel,
    tokens: torch.Tensor,
    advance: Advance = lambda done, total: None,
) -> Comparison:
    """Run both models, one after the other, on windows of tokens (B, T >= 2) of the source's vocabulary.

    A target with a larger vocabulary is judged by what it says of the source's.
    """
    before, after = _final_states([source, target], tokens, advance)
    sums = _Sums()
    length = tokens.shape[1]
    with source.head() as source_head, target.head() as target_head:
        for window, start in product(range(len(tokens)), range(0, length, POSITIONS)):
            end = start + POSITIONS
            logits = _finite(source_head(before[window, start:end]), "source")
            others = _finite(target_head(after[window, start:end]), "converted model")
            sums.add(logits, others[:, : logits.shape[1]], tokens[window, start + 1 : end + 1])
    losses = torch.tensor([sums.before, sums.after], dtype=torch.float64) / sums.labels
    perplexities = losses.exp()
    return Comparison(
        windows=len(tokens),
        window_length=length,
        greatest_logit_difference=sums.greatest,
        mean_logit_difference=sums.difference / sums.logits,
        largest_logit=sums.largest,
        kl_divergence=sums.divergence / sums.positions,
        loss_before=float(losses[0]),
        loss_after=float(losses[1]),
        perplexity_before=float(perplexities[0]),
        perplexity_after=float(perplexities[1]),
        greedy_agreement=sums.agreed / sums.positions,
    )


def _final_states(models: list[StreamedModel], tokens: torch.Tensor, advance: Advance) -> list[torch.Tensor]:
    """What each model's last layer puts out."""
    total = sum(model.config.num_hidden_layers for model in models)
    done = count(1)
    return [model.run(tokens, lambda: advance(next(done), total)) for model in models]


def _finite(logits: torch.Tensor, whose: str) -> torch.Tensor:
    if not logits.isfinite().all():
        raise ConversionError(
            f"the {whose} gives logits that are no numbers (nan or inf) on the sample text: its weights are damaged, "
            "or too large for their number format"
        )
    return logits
