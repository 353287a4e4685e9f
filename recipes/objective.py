"""What a step minimises: the next token's loss, balance losses, and the distance from a teacher."""

from typing import Any

import torch
from torch import nn

from .distilling import attention_errors, attention_outputs, instead_of_labels, next_token_losses, predictions
from .routing import HeadRouting
from .schema import Distillation
from .teacher_logits import INDICES, LOGARITHMS


class Objective:
    """The loss of a micro batch as its part of the step's: those of all micro batches and processes add up."""

    def __init__(
        self, routing: HeadRouting | None, distillation: Distillation | None, teacher: nn.Module | None
    ) -> None:
        self._routing, self._options, self._teacher = routing, distillation, teacher

    def __call__(self, model: nn.Module, inputs: dict[str, Any], items: Any, step: int) -> tuple[torch.Tensor, Any]:
        """The loss and the model's outputs; `items` is how many tokens the whole step predicts."""
        stored = tuple(inputs.pop(name) for name in (INDICES, LOGARITHMS) if name in inputs)
        if self._options is None:
            return self._predict(model, inputs, items)
        if step < self._options.match_steps:
            return self._match(model, inputs, items)
        teacher = stored or (self._asked(inputs)["logits"],)
        loss, outputs = self._predict(model, inputs, items)
        exchange = instead_of_labels(outputs["logits"], inputs["labels"], teacher, self._options.temperature)
        return loss + self._options.weight * exchange / items, outputs

    def _predict(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> tuple[torch.Tensor, Any]:
        """The next token's loss, with balance losses."""
        asked = inputs | {"num_items_in_batch": items, "use_cache": False}  # a cache would join documents
        if self._routing is None:
            outputs = model(**asked)
            return outputs["loss"], outputs
        outputs = model(**asked, output_head_router_scores=True)
        return outputs["loss"] + self._routing.by_sequence(outputs, inputs["labels"], items), outputs

    def _match(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> tuple[torch.Tensor, Any]:
        """Attention outputs alone; nothing of the predictions, which data parallelism must see all the same."""
        with attention_outputs(self._teacher) as wanted:  # type: ignore[arg-type]
            self._asked(inputs)
        with attention_outputs(model) as found:
            loss, outputs = self._predict(model, inputs, items)
        shares = predictions(inputs["labels"]) / items
        return (attention_errors(found, wanted) * shares).sum() + 0.0 * loss, outputs

    @torch.no_grad()
    def _asked(self, inputs: dict[str, Any]) -> Any:
        return self._teacher(**_unlabelled(inputs))  # type: ignore[misc]


@torch.no_grad()
def evaluated(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """By sequence, the next token's loss alone, which all models have in common, and how many are predicted (B, 2)."""
    logits = model(**_unlabelled(inputs))["logits"]
    return torch.stack([next_token_losses(logits, inputs["labels"]), predictions(inputs["labels"]).float()], dim=1)


def _unlabelled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"} | {"use_cache": False}
