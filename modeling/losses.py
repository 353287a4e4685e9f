"""The output of our causal language models, and how auxiliary losses count under gradient accumulation."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

IGNORED_LABEL = -100


@dataclass
class CrossheadCausalLMOutput(MoeCausalLMOutputWithPast):
    """A causal language model's output, and what its head routers did."""

    balance_loss: Tensor | None = None
    """Before its weight; mean over the layers that route."""
    head_router_scores: tuple[Tensor, ...] | None = None
    """Per routing layer, each routed head's probability: (B, T, routed heads)."""


def share_of_batch(labels: Tensor, kwargs: dict[str, Any]) -> Tensor | float:
    """This call's share of the batch whose gradients are accumulated, by predicted tokens.

    A training loop that accumulates over several calls or devices passes the number of predicted tokens in all of
    them as `num_items_in_batch`, and sums the losses of the calls.
    """
    items = kwargs.get("num_items_in_batch")
    if items is None:
        return 1.0
    targets = kwargs.get("shift_labels")
    targets = labels[..., 1:] if targets is None else targets
    return targets.ne(IGNORED_LABEL).sum() / items
