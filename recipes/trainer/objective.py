"""Base class of objectives: data, loss and scores, with default methods; `objectives.py` has the table of all."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.nn import functional

from crosshead.common.progress import Progress

from ..data.training_data import NOT_PREDICTED, TrainingData
from ..schema.recipe import Recipe
from .load_balance import HeadRouting

LABELS, ORDER_LABELS = "labels", "order_labels"
TARGETS = (LABELS, ORDER_LABELS)
"""Fields of a sample that the model does not read. All samples have `labels`, whose entries other than -100 count."""
LOSS, ACCURACY = "loss", "accuracy"

Scores = dict[str, torch.Tensor]
"""Metric -> for each sequence, the sum over its predictions, and their number (B, 2)."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of one kind for a micro batch."""

    prefix: str
    """Prefix of the metric names; empty for the main predictions."""
    logits: torch.Tensor
    """(B, ..., classes)."""
    labels: torch.Tensor
    """(B, ...)."""

    @property
    def counts(self) -> torch.Tensor:
        """The number of predictions in each sequence (B)."""
        return self._sums(self.labels != NOT_PREDICTED)

    @property
    def losses(self) -> torch.Tensor:
        """The sum over the predictions of each sequence (B)."""
        logits, labels = self.logits.reshape(-1, self.logits.shape[-1]).float(), self.labels.reshape(-1)
        losses = functional.cross_entropy(logits, labels, ignore_index=NOT_PREDICTED, reduction="none")
        return self._sums(losses.view_as(self.labels))

    @property
    def right(self) -> torch.Tensor:
        """The number of predictions whose highest logit is that of the label (B)."""
        return self._sums(self.logits.argmax(-1) == self.labels)

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(len(values), -1).sum(1)


class Objective(ABC):
    """The data, the loss and the scores of a run."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.options = recipe, cast(Any, recipe.objective)

    @abstractmethod
    def load_processor(self) -> Any:
        """The tokenizer or the image processor, which is saved with the result."""

    @abstractmethod
    def complete_config(self, config: Any, processor: Any) -> None:
        """Set the fields of a new model's configuration that follow from the processor."""

    def new_model(self, config: Any) -> nn.Module:
        """A model with random initial values."""
        return getattr(transformers, self.recipe.objective.auto_class).from_config(config, dtype=torch.float32)

    def new_head(self, processor: Any) -> dict[str, Any]:
        """Changes to the configuration of a model that is continued with a new head; none if it keeps its own."""
        return {}

    @abstractmethod
    def open_data(self, processor: Any, config: Any, progress: Progress) -> TrainingData:
        """The data for a model with this configuration."""

    @abstractmethod
    def predictions(self, outputs: Any, inputs: dict[str, Any]) -> list[Predictions]:
        """The predictions of a micro batch, the main kind first."""

    @property
    def collator(self) -> Any:
        """The data collator; None for that of transformers."""
        return None

    @abstractmethod
    def example(self, config: Any, rows: int) -> dict[str, Any]:
        """Inputs of the model, in the shape of a micro batch with so many samples."""

    @abstractmethod
    def logits(self, config: Any) -> int:
        """The numbers in the logits of a sample."""

    def model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of the model."""
        return {name: value for name, value in inputs.items() if name not in TARGETS}

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], items: Any, routing: HeadRouting | None
    ) -> tuple[torch.Tensor, Any]:
        """The micro batch's part of the step's loss, and the outputs; `items` are the main predictions of the step.

        Each kind contributes its mean loss over the step. The later kinds have one prediction per sample.
        """
        wanted = {} if routing is None else {"output_head_router_scores": True}
        outputs = model(**self.model_inputs(inputs), **wanted)
        main, *others = self.predictions(outputs, inputs)
        loss = main.losses.sum() / items
        for other in others:
            loss = loss + other.losses.sum() / self.recipe.batch_size
        if routing is not None:
            loss = loss + routing.loss_by_sequence(outputs, main.counts / items)
        return loss, outputs

    @torch.no_grad()
    def evaluate(self, model: nn.Module, inputs: dict[str, Any]) -> Scores:
        """The scores of a micro batch, without the losses of mechanisms."""
        found: Scores = {}
        for each in self.predictions(model(**self.model_inputs(inputs)), inputs):
            for metric, sums in ((LOSS, each.losses), (ACCURACY, each.right)):
                found[each.prefix + metric] = torch.stack([sums.float(), each.counts.float()], dim=1)
        return found


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """The target of each logit (B, T); the last ones have none."""
    return functional.pad(labels[:, 1:], (0, 1), value=NOT_PREDICTED)


def count_predictions(labels: torch.Tensor) -> torch.Tensor:
    """The number of predicted tokens in each sequence (B)."""
    return (labels[:, 1:] != NOT_PREDICTED).sum(1)
