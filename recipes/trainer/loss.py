"""The training loss: next-token loss, balance losses, and the distance from a teacher."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from crosshead.modeling.mechanisms.mixture import balance_loss
from crosshead.modeling.model import share_of_batch

from ..schema.sections import Distillation
from .distillation import attention_errors, attention_outputs, instead_of_labels, next_token_losses, predictions
from .teacher_logits import INDICES, LOGARITHMS


class HeadRouting:
    """The routers of one model."""

    def __init__(self, config: Any) -> None:
        mixers = {layer: config.mixers_of_layer(layer) for layer in range(config.num_hidden_layers)}
        options = {layer: found["mixture"] for layer, found in mixers.items() if "mixture" in found}
        self.layers = tuple(options)
        """Those that have one."""
        self._weight = config.mixers["mixture"]["balance_weight"]
        self._selected = [settings["active_heads"] - settings["shared_heads"] for settings in options.values()]

    @classmethod
    def of(cls, config: Any) -> "HeadRouting | None":
        """None for a model without routers."""
        return cls(config) if "mixture" in (getattr(config, "mixers", None) or {}) else None

    def by_sequence(self, outputs: Any, labels: torch.Tensor, items: Any) -> torch.Tensor:
        """What to add to the model's loss, so that its balance loss is taken sequence by sequence.

        The model takes it over all tokens that it is given, and it is no sum over tokens: the loss of a step would
        depend on how the step is divided into micro batches and among processes.
        """
        batch = {"num_items_in_batch": items}
        alone = [
            balance_loss([layer[row : row + 1] for layer in outputs["head_router_scores"]], self._selected, None)
            * share_of_batch(labels[row : row + 1], batch)
            for row in range(len(labels))
        ]
        return self._weight * (torch.stack(alone).sum() - outputs["balance_loss"] * share_of_batch(labels, batch))

    def load(self, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each layer, the share of a micro batch's tokens that select each routed head (heads)."""
        found = []
        for probabilities, count in zip(scores, self._selected, strict=True):
            chosen = probabilities.detach().topk(count, dim=-1).indices
            found.append(torch.zeros_like(probabilities).scatter(-1, chosen, 1.0).flatten(0, -2).float().mean(0))
        return found


def extremes(loads: Mapping[int, torch.Tensor]) -> dict[str, float]:
    """By layer, the least and the most used head's share of a step's tokens."""
    found: dict[str, float] = {}
    for layer, load in loads.items():
        found |= {f"head_load/{layer}/least": load.min().item(), f"head_load/{layer}/most": load.max().item()}
    return found


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
