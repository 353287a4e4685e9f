"""Compares the logits of two models on the same text. Models are streamed: neither has to fit in memory."""

from dataclasses import dataclass
from itertools import count, product

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance

from ..calibration.streamed_model import StreamedModel

POSITIONS = 64
"""Number of positions whose logits are computed at a time: the logits of a whole window can be gigabytes."""


@dataclass(frozen=True)
class Comparison:
    """Differences between source and target on the same tokens, over the source's vocabulary."""

    windows: int
    window_length: int
    greatest_logit_difference: float
    mean_logit_difference: float
    """Mean absolute difference of all logits."""
    largest_logit: float
    """Largest absolute logit of the source, the scale of the differences."""
    kl_divergence: float
    """KL divergence KL(source || target) of the predicted distributions in nats, mean over positions."""
    loss_before: float
    loss_after: float
    perplexity_before: float
    perplexity_after: float
    greedy_agreement: float
    """Fraction of positions with the same most likely token."""


def _rows(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return maximum and mean difference, largest logit, KL divergence, agreement (n, 5) of logits (n, vocabulary)."""
    difference, agreed = (source - target).abs().double(), source.argmax(-1) == target.argmax(-1)
    before, after = source.double().log_softmax(-1), target.double().log_softmax(-1)
    divergence = functional.kl_div(after, before, reduction="none", log_target=True).sum(-1)
    columns = difference.amax(-1), difference.mean(-1), source.abs().amax(-1), divergence, agreed
    return torch.stack([column.double() for column in columns], dim=-1)


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
    rows, losses, tokens = list[torch.Tensor](), list[torch.Tensor](), source.predicted(tokens)
    length = tokens.shape[1]
    with source.head() as source_head, target.head() as target_head:
        for window, start in product(range(len(tokens)), range(0, length, POSITIONS)):
            end = start + POSITIONS
            expected = _finite(source_head(before[window, start:end]), "source")
            logits = _finite(target_head(after[window, start:end]), "converted model")[:, : expected.shape[1]]
            rows.append(_rows(expected, logits))
            labels = tokens[window, start + 1 : end + 1].to(logits.device)  # the last token has no label
            both = (values[: len(labels)].double() for values in (expected, logits))
            losses.append(torch.stack([functional.cross_entropy(values, labels, reduction="none") for values in both]))
    greatest, mean, loss = torch.cat(rows).amax(0), torch.cat(rows).mean(0), torch.cat(losses, dim=1).mean(1)
    return Comparison(
        windows=len(tokens),
        window_length=length,
        greatest_logit_difference=float(greatest[0]),
        mean_logit_difference=float(mean[1]),
        largest_logit=float(greatest[2]),
        kl_divergence=float(mean[3]),
        loss_before=float(loss[0]),
        loss_after=float(loss[1]),
        perplexity_before=float(loss[0].exp()),
        perplexity_after=float(loss[1].exp()),
        greedy_agreement=float(mean[4]),
    )


def _finite(logits: torch.Tensor, model: str) -> torch.Tensor:
    if not logits.isfinite().all():
        raise ConversionError(
            f"the logits of the {model} on the sample text contain nan or inf: its weights are damaged, or too large "
            "for their dtype"
        )
    return logits
