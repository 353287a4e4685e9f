"""Base class of training objectives: data, loss and evaluation metrics. `objectives.py` lists all objectives."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.nn import functional

from crosshead.common.errors import RecipeError
from crosshead.common.progress import Progress
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.model import IGNORED_LABEL

from ..data.training_data import TrainingData
from ..schema.recipe import Recipe
from .load_balance import HeadRouting

LABELS, ORDER_LABELS = "labels", "order_labels"
TARGETS = (LABELS, ORDER_LABELS)
"""Fields of a sample that are not model inputs. All samples have `labels`; entries other than -100 are predicted."""
LOSS, ACCURACY = "loss", "accuracy"

Scores = dict[str, torch.Tensor]
"""Metric -> per sequence, the sum over its predictions and the number of predictions (B, 2)."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of one kind (one output head) for a micro batch."""

    prefix: str
    """Prefix of the metric names; empty for the main head."""
    logits: torch.Tensor
    """Logits (B, ..., classes)."""
    labels: torch.Tensor
    """Target classes (B, ...), or -100 where nothing is predicted."""

    @property
    def counts(self) -> torch.Tensor:
        """Number of predictions in each sequence (B)."""
        return self._sums(self.labels != IGNORED_LABEL)

    @property
    def losses(self) -> torch.Tensor:
        """Sum of the cross-entropies of the predictions in each sequence (B)."""
        logits, labels = self.logits.reshape(-1, self.logits.shape[-1]).float(), self.labels.reshape(-1)
        losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
        return self._sums(losses.view_as(self.labels))

    @property
    def right(self) -> torch.Tensor:
        """Number of correct predictions in each sequence (B)."""
        return self._sums(self.logits.argmax(-1) == self.labels)

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(len(values), -1).sum(1)


class Objective(ABC):
    """Data, loss and evaluation metrics of a run."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.options = recipe, cast(Any, recipe.objective)

    @abstractmethod
    def load_processor(self) -> Any:
        """Load the tokenizer or the image processor, which is also saved with the trained model."""

    @abstractmethod
    def complete_config(self, config: Any, processor: Any) -> None:
        """Set the fields of a new model's configuration that depend on the processor, such as special tokens."""

    def check_losses(self, mechanisms: Iterable[str]) -> None:
        """Refuse a mechanism with an auxiliary loss that `loss` does not add; it adds that of mixture."""
        for name in set(mechanisms) - {"mixture"}:
            if "auxiliary_loss" in vars(MECHANISMS[name]):
                raise RecipeError(
                    f"objective.name={self.recipe.objective.name} does not add the auxiliary loss of {name!r}: train "
                    "the model in your own loop, whose loss is the model's"
                )

    def new_model(self, config: Any) -> nn.Module:
        """Return a randomly initialised model in float32."""
        return getattr(transformers, self.recipe.objective.auto_class).from_config(config, dtype=torch.float32)

    def new_head(self, processor: Any) -> dict[str, Any]:
        """Return the configuration changes for a pretrained model that gets a new head; empty if it keeps its own."""
        return {}

    @abstractmethod
    def open_data(self, processor: Any, config: Any, progress: Progress) -> TrainingData:
        """Open the training and evaluation data for a model with this configuration."""

    def predictions(self, outputs: Any, inputs: dict[str, Any]) -> list[Predictions]:
        """Return the predictions of a micro batch, those of the main head first."""
        return [Predictions("", outputs["logits"], inputs[LABELS])]

    @property
    def collator(self) -> Any:
        """Data collator; None for transformers' default."""
        return None

    @abstractmethod
    def example(self, config: Any, rows: int) -> dict[str, Any]:
        """Return dummy model inputs with the shapes of a micro batch of `rows` samples."""

    @abstractmethod
    def logits(self, config: Any) -> int:
        """Return the number of logits of one sample."""

    def model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model, without targets."""
        return {name: value for name, value in inputs.items() if name not in TARGETS}

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], items: Any, routing: HeadRouting | None
    ) -> tuple[torch.Tensor, Any]:
        """Return the micro batch's part of the step's loss, and the outputs.

        `items` is the number of main predictions in the whole step. Each kind of predictions contributes its mean over
        the step; kinds other than the main one have one prediction per sample.
        """
        options = {} if routing is None else {"output_head_router_scores": True}
        outputs = model(**self.model_inputs(inputs), **options)
        main, *others = self.predictions(outputs, inputs)
        loss = main.losses.sum() / items
        for other in others:
            loss = loss + other.losses.sum() / self.recipe.batch_size
        if routing is not None:
            loss = loss + routing.loss_by_sequence(outputs, main.counts / items)
        return loss, outputs

    @torch.no_grad()
    def evaluate(self, model: nn.Module, inputs: dict[str, Any]) -> Scores:
        """Return loss and accuracy of a micro batch, without balance losses."""
        scores: Scores = {}
        for predictions in self.predictions(model(**self.model_inputs(inputs)), inputs):
            for metric, sums in ((LOSS, predictions.losses), (ACCURACY, predictions.right)):
                scores[predictions.prefix + metric] = torch.stack([sums.float(), predictions.counts.float()], dim=1)
        return scores


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels left by one: the target of each position (B, T); the last position has none."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def count_predictions(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of predicted tokens in each sequence (B), given next-token labels (B, T)."""
    return (labels[:, 1:] != IGNORED_LABEL).sum(1)
