"""Compares the logits of two models on the same text. Both are streamed: neither has to fit in memory."""

from dataclasses import dataclass
from itertools import count, product

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance

from ..calibration.streamed_model import StreamedModel

POSITIONS = 64
"""The number of positions whose logits are computed at a time: those of a whole window can be gigabytes."""


@dataclass(frozen=True)
class Comparison:
    """The difference between source and target, on the source's vocabulary."""

    windows: int
    window_length: int
    greatest_logit_difference: float
    mean_logit_difference: float
    """Of absolute differences."""
    largest_logit: float
    """Of the source, by absolute value: the scale of the differences."""
    kl_divergence: float
    """From the source's predictions to the target's, mean over positions, in nats."""
    loss_before: float
    loss_after: float
    perplexity_before: float
    perplexity_after: float
    greedy_agreement: float
    """The share of positions with the same most likely token."""


class _Sums:
    """Running sums over positions, in float64."""

    def __init__(self) -> None:
        self.positions = self.logits = self.labels = self.agreed = 0
        self.greatest = self.largest = self.difference = self.divergence = self.before = self.after = 0.0

    def add(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> None:
        """Add logits (n, vocabulary) of n positions, and the following tokens: n, or n - 1 at the end of the text."""
        difference = (source - target).abs()
        self.positions += len(source)
        self.logits += source.numel()
        self.labels += len(labels)
        self.agreed += int((source.argmax(-1) == target.argmax(-1)).sum())
        self.greatest = max(self.greatest, float(difference.max()))
        self.largest = max(self.largest, float(source.abs().max()))
        self.difference += float(difference.sum(dtype=torch.float64))
        before, after = source.double().log_softmax(-1), target.double().log_softmax(-1)
        self.divergence += float(functional.kl_div(after, before, reduction="sum", log_target=True))
        self.before += float(functional.nll_loss(before[: len(labels)], labels, reduction="sum"))
        self.after += float(functional.nll_loss(after[: len(labels)], labels, reduction="sum"))


@torch.no_grad()
def compare(
    source: StreamedModel, target: StreamedModel, tokens: torch.Tensor, advance: Advance = lambda done, total: None
) -> Comparison:
    """Run both models, one after the other, on windows of tokens (B, T >= 2) of the source's vocabulary.

    Additional tokens in the target's vocabulary are ignored. `advance` counts the layers of both models.
    """
    total = source.depth + target.depth
    done = count(1)
    before, after = (model.run(tokens, lambda: advance(next(done), total)) for model in (source, target))
    sums, tokens = _Sums(), source.predicted(tokens)
    length = tokens.shape[1]
    with source.head() as source_head, target.head() as target_head:
        for window, start in product(range(len(tokens)), range(0, length, POSITIONS)):
            end = start + POSITIONS
            expected = _finite(source_head(before[window, start:end]), "source")
            logits = _finite(target_head(after[window, start:end]), "converted model")
            sums.add(expected, logits[:, : expected.shape[1]], tokens[window, start + 1 : end + 1].to(logits.device))
    losses = torch.tensor([sums.before, sums.after], dtype=torch.float64) / sums.labels
    return Comparison(
        windows=len(tokens),
        window_length=length,
        greatest_logit_difference=sums.greatest,
        mean_logit_difference=sums.difference / sums.logits,
        largest_logit=sums.largest,
        kl_divergence=sums.divergence / sums.positions,
        loss_before=float(losses[0]),
        loss_after=float(losses[1]),
        perplexity_before=float(losses[0].exp()),
        perplexity_after=float(losses[1].exp()),
        greedy_agreement=sums.agreed / sums.positions,
    )


def _finite(logits: torch.Tensor, model: str) -> torch.Tensor:
    if not logits.isfinite().all():
        raise ConversionError(
            f"the logits of the {model} on the sample text contain nan or inf: its weights are damaged, or too large "
            "for their dtype"
        )
    return logits
