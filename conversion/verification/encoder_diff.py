"""Compares the outputs of two encoders on the same inputs. Models are streamed: neither has to fit in memory."""

from itertools import count
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance

from ..calibration.streamed_model import StreamedModel


@torch.no_grad()
def compare_encoders(
    source: StreamedModel, target: StreamedModel, inputs: torch.Tensor, advance: Advance
) -> dict[str, Any]:
    """Run both models, one after the other, on windows of tokens (B, T) or on pixel values, and compare the outputs.

    The outputs are logits of image classifiers, otherwise the last hidden states. `token_cosine` is the cosine
    similarity, mean over tokens; `embedding_cosine` is that of the mean vectors of windows or images, which sentence
    encoders use as embeddings.
    """
    total = source.depth + target.depth
    done = count(1)
    before, after = (model.run(inputs, lambda: advance(next(done), total)) for model in (source, target))
    cosines = {"token_cosine": _cosine(before, after), "embedding_cosine": _cosine(before.mean(1), after.mean(1))}
    with source.head() as source_head, target.head() as target_head:
        before, after = source_head(before), target_head(after)
    for outputs, name in ((before, "source"), (after, "converted model")):
        if not outputs.isfinite().all():
            raise ConversionError(f"the {name} computes nan or inf: its checkpoint is damaged, or overflows")
    difference, is_logits = (before - after).abs(), before.ndim == 2
    kind = "logit" if is_logits else "hidden"
    return {
        **_size(inputs),
        f"greatest_{kind}_difference": float(difference.max()),
        f"mean_{kind}_difference": float(difference.mean()),
        f"largest_{kind}": float(before.abs().max()),
        **(_classes(before, after) if is_logits else {}),
        **cosines,
    }


def _size(inputs: torch.Tensor) -> dict[str, int]:
    if inputs.is_floating_point():
        return {"images": len(inputs)}
    return {"windows": len(inputs), "window_length": inputs.shape[1]}


def _classes(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Return KL divergence and agreement of the predicted classes, from logits (B, classes)."""
    expected, actual = (logits.double().log_softmax(-1) for logits in (before, after))
    return {
        "kl_divergence": float(functional.kl_div(actual, expected, reduction="batchmean", log_target=True)),
        "class_agreement": float((before.argmax(-1) == after.argmax(-1)).double().mean()),
    }


def _cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(functional.cosine_similarity(first.double(), second.double(), dim=-1).mean())
