"""What the head routers of `mixture` do in training: their balance loss, and how much each head is used."""

from collections.abc import Sequence
from typing import Any

import torch

from crosshead.modeling.balance import balance_loss, share_of_batch


class HeadRouting:
    """The routers of one model."""

    def __init__(self, config: Any) -> None:
        layers = (config.mixers_of_layer(layer) for layer in range(config.num_hidden_layers))
        options = [layer["mixture"] for layer in layers if "mixture" in layer]
        self._weight = config.mixers["mixture"]["balance_weight"]
        self._selected = [settings["active_heads"] - settings["shared_heads"] for settings in options]

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

    def load(self, scores: Sequence[torch.Tensor]) -> dict[str, float]:
        """Of the routed heads of each layer, the smallest and the largest share of tokens that select one."""
        found: dict[str, float] = {}
        for index, (probabilities, count) in enumerate(zip(scores, self._selected, strict=True)):
            chosen = probabilities.detach().topk(count, dim=-1).indices
            load = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0).flatten(0, -2).mean(0)
            found |= {f"head_load/{index}/least": load.min().item(), f"head_load/{index}/most": load.max().item()}
        return found
