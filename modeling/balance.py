"""The balance loss of `mixture`, and the model output that carries it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

IGNORED_LABEL = -100


@dataclass
class MixedCausalLMOutput(MoeCausalLMOutputWithPast):
    """A causal language model's output, plus what the head routers did."""

    balance_loss: torch.Tensor | None = None
    """Before its weight; mean over the layers that route."""
    head_router_scores: tuple[torch.Tensor, ...] | None = None
    """Per routing layer, each routed head's probability: (B, T, routed heads)."""


def balance_loss(
    scores: Sequence[torch.Tensor], selected: Sequence[int], attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """`sum_i P_i f_i` over a layer's routed heads, mean over layers.

    `P_i` is a head's mean probability, `f_i` the share of tokens that select it. `scores` are (B, T, routed heads),
    `selected` says how many heads each layer selects. A mask (B, T) takes padding out of both means; one with
    more dimensions, made by the caller, says nothing about padding.
    """
    losses = []
    for probabilities, count in zip(scores, selected, strict=True):
        tokens = token_weights(probabilities, attention_mask).unsqueeze(-1)
        chosen = probabilities.topk(count, dim=-1).indices
        frequency = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        # Not as a product of matrices, which autocast would round.
        mean_probability = (tokens * probabilities).sum((0, 1))
        mean_frequency = (tokens * frequency).sum((0, 1))
        losses.append((mean_probability * mean_frequency).sum().to(scores[0].device))
    return torch.stack(losses).mean()


def token_weights(scores: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """What each token (B, T) contributes to a mean: nothing if it is padding."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        weights = scores.new_ones(scores.shape[:2])
    else:
        if attention_mask.shape != scores.shape[:2]:
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} does not say which of the "
                f"{tuple(scores.shape[:2])} tokens are padding: use one of that shape"
            )
        weights = attention_mask.to(scores)
    return weights / weights.sum().clamp_min(1)


def share_of_batch(labels: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | float:
    """This call's share of the batch that is being accumulated, by predicted tokens.

    A training loop that accumulates gradients over several calls, on one or many devices, passes the number of
    predicted tokens in all of them as `num_items_in_batch` and divides by nothing afterwards: the losses of the
    calls are summed.
    """
    items = kwargs.get("num_items_in_batch")
    if items is None:
        return 1.0
    targets = kwargs.get("shift_labels")
    targets = labels[..., 1:] if targets is None else targets
    return targets.ne(IGNORED_LABEL).sum() / items
