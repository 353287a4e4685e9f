"""The next-token labels of a batch: which logit predicts which token, and how many predictions a sequence has."""

import torch
from torch.nn import functional

from ..data.training_data import NOT_PREDICTED


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """The target of each logit (B, T); the last ones have none."""
    return functional.pad(labels[:, 1:], (0, 1), value=NOT_PREDICTED)


def count_predictions(labels: torch.Tensor) -> torch.Tensor:
    """The number of predicted tokens in each sequence (B)."""
    return (labels[:, 1:] != NOT_PREDICTED).sum(1)
