"""The next-token loss of each sequence, by which runs are evaluated, and its parts."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..data.training_data import NOT_PREDICTED


@torch.no_grad()
def evaluate(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """For each sequence, the sum of next-token losses and the number of predictions (B, 2)."""
    logits = model(**without_labels(inputs))["logits"]
    losses = next_token_losses(logits, inputs["labels"])
    return torch.stack([losses, count_predictions(inputs["labels"]).float()], dim=1)


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """What a decoder reads; no cache, with which attention would join documents."""
    return {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """The target of each logit (B, T); the last ones have none."""
    return functional.pad(labels[:, 1:], (0, 1), value=NOT_PREDICTED)


def count_predictions(labels: torch.Tensor) -> torch.Tensor:
    """The number of predicted tokens in each sequence (B)."""
    return (labels[:, 1:] != NOT_PREDICTED).sum(1)


def next_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over the predictions of each sequence (B)."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), next_labels(labels).flatten(), ignore_index=NOT_PREDICTED, reduction="none"
    )
    return losses.view_as(labels).sum(1)
