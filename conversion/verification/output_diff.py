"""Compares the outputs of two models on the same inputs. Models are streamed: neither has to fit in memory."""

from itertools import count, product
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance

from ..calibration.streamed_model import StreamedModel

POSITIONS = 64
"""Number of positions whose logits are computed at a time: the logits of a whole window can be gigabytes."""
_DAMAGED_LOGITS = (
    "the logits of the {model} on the sample text contain nan or inf: its weights are damaged, or too large for their "
    "dtype"
)
_DAMAGED_OUTPUTS = "the {model} computes nan or inf: its checkpoint is damaged, or overflows"


@torch.no_grad()
def compare_decoders(
    source: StreamedModel, target: StreamedModel, tokens: torch.Tensor, advance: Advance = lambda done, total: None
) -> dict[str, Any]:
    """Compare the logits on windows of tokens (B, T >= 2) of the source's vocabulary; ignore further target tokens.

    The fields are those of `verification` in conversion.json: greatest and mean absolute difference and largest logit
    of the source, KL(source || target) in nats, losses, and the fraction of positions with the same most likely token.
    """
    before, after = _run_both(source, target, tokens, advance)
    rows, losses, tokens = list[torch.Tensor](), list[torch.Tensor](), source.predicted(tokens)
    length = tokens.shape[1]
    with source.head() as source_head, target.head() as target_head:
        for window, start in product(range(len(tokens)), range(0, length, POSITIONS)):
            end = start + POSITIONS
            expected, logits = source_head(before[window, start:end]), target_head(after[window, start:end])
            _check_finite(expected, logits, _DAMAGED_LOGITS)
            logits = logits[:, : expected.shape[1]]
            rows.append(_rows(expected, logits))
            labels = tokens[window, start + 1 : end + 1].to(logits.device)  # the last token has no label
            both = (values[: len(labels)].double() for values in (expected, logits))
            losses.append(torch.stack([functional.cross_entropy(values, labels, reduction="none") for values in both]))
    greatest, mean, loss = torch.cat(rows).amax(0), torch.cat(rows).mean(0), torch.cat(losses, dim=1).mean(1)
    return {
        "windows": len(tokens),
        "window_length": length,
        "greatest_logit_difference": float(greatest[0]),
        "mean_logit_difference": float(mean[1]),
        "largest_logit": float(greatest[2]),
        "kl_divergence": float(mean[3]),
        "loss_before": float(loss[0]),
        "loss_after": float(loss[1]),
        "perplexity_before": float(loss[0].exp()),
        "perplexity_after": float(loss[1].exp()),
        "greedy_agreement": float(mean[4]),
    }


def _rows(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return maximum and mean difference, largest logit, KL divergence, agreement (n, 5) of logits (n, vocabulary)."""
    difference, agreed = (source - target).abs().double(), source.argmax(-1) == target.argmax(-1)
    before, after = source.double().log_softmax(-1), target.double().log_softmax(-1)
    divergence = functional.kl_div(after, before, reduction="none", log_target=True).sum(-1)
    columns = difference.amax(-1), difference.mean(-1), source.abs().amax(-1), divergence, agreed
    return torch.stack([column.double() for column in columns], dim=-1)


@torch.no_grad()
def compare_encoders(
    source: StreamedModel, target: StreamedModel, inputs: torch.Tensor, advance: Advance
) -> dict[str, Any]:
    """Compare the logits of image classifiers, or else the last hidden states, on tokens (B, T) or pixel values.

    `token_cosine` is the cosine similarity, mean over tokens; `embedding_cosine` is that of the mean vectors of
    windows or images, which sentence encoders use as embeddings.
    """
    before, after = _run_both(source, target, inputs, advance)
    cosines = {"token_cosine": _cosine(before, after), "embedding_cosine": _cosine(before.mean(1), after.mean(1))}
    with source.head() as source_head, target.head() as target_head:
        before, after = source_head(before), target_head(after)
    _check_finite(before, after, _DAMAGED_OUTPUTS)
    difference, is_logits = (before - after).abs(), before.ndim == 2
    kind = "logit" if is_logits else "hidden"
    size = {"windows": len(inputs), "window_length": inputs.shape[1]}
    return {
        **({"images": len(inputs)} if inputs.is_floating_point() else size),
        f"greatest_{kind}_difference": float(difference.max()),
        f"mean_{kind}_difference": float(difference.mean()),
        f"largest_{kind}": float(before.abs().max()),
        **(_classes(before, after) if is_logits else {}),
        **cosines,
    }


def _classes(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Return KL divergence and agreement of the predicted classes, from logits (B, classes)."""
    expected, actual = (logits.double().log_softmax(-1) for logits in (before, after))
    return {
        "kl_divergence": float(functional.kl_div(actual, expected, reduction="batchmean", log_target=True)),
        "class_agreement": float((before.argmax(-1) == after.argmax(-1)).double().mean()),
    }


def _cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(functional.cosine_similarity(first.double(), second.double(), dim=-1).mean())


def _run_both(
    source: StreamedModel, target: StreamedModel, inputs: torch.Tensor, advance: Advance
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states of both models, run one after the other; `advance` counts the layers of both."""
    total, done = source.depth + target.depth, count(1)
    before, after = (model.run(inputs, lambda: advance(next(done), total)) for model in (source, target))
    return before, after


def _check_finite(before: torch.Tensor, after: torch.Tensor, message: str) -> None:
    for outputs, model in ((before, "source"), (after, "converted model")):
        if not outputs.isfinite().all():
            raise ConversionError(message.format(model=model))
