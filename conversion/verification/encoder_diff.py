"""Compares the hidden states of two encoders on the same text. Both are streamed: neither has to fit in memory."""

from itertools import count
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance

from ..calibration.streamed_model import StreamedModel


@torch.no_grad()
def compare_encoders(
    source: StreamedModel, target: StreamedModel, tokens: torch.Tensor, advance: Advance = lambda done, total: None
) -> dict[str, Any]:
    """Run both models, one after the other, on windows of tokens (B, T), and compare their last hidden states.

    A cosine is the mean over tokens, and over the windows' mean vectors, which sentence encoders use as embeddings.
    """
    total = sum(model.config.num_hidden_layers for model in (source, target))
    done = count(1)
    before, after = (model.run(tokens, lambda: advance(next(done), total)) for model in (source, target))
    for hidden, name in ((before, "source"), (after, "converted model")):
        if not hidden.isfinite().all():
            raise ConversionError(f"the {name} computes nan or inf: its checkpoint is damaged, or overflows")
    difference = (before - after).abs()
    return {
        "windows": len(tokens),
        "window_length": tokens.shape[1],
        "greatest_hidden_difference": float(difference.max()),
        "mean_hidden_difference": float(difference.mean()),
        "largest_hidden": float(before.abs().max()),
        "token_cosine": _cosine(before, after),
        "embedding_cosine": _cosine(before.mean(1), after.mean(1)),
    }


def _cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(functional.cosine_similarity(first.double(), second.double(), dim=-1).mean())
