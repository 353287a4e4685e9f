"""What the head routers of `mixture` do in training: their balance loss, and how much each head is used."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from crosshead.modeling.mechanisms.mixture import balance_loss
from crosshead.modeling.model import share_of_batch


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
