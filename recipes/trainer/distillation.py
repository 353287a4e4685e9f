"""Distillation from the source model: its predictions, and at first its attention outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..data.packing import NOT_PREDICTED

ROWS = 512
"""Predictions compared at once, and again in the backward pass: logits are the largest tensors of a step."""


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """What each logit (B, T) predicts; the last ones predict nothing."""
    return functional.pad(labels[:, 1:], (0, 1), value=NOT_PREDICTED)


def predictions(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens of each sequence (B) are predicted."""
    return (labels[:, 1:] != NOT_PREDICTED).sum(1)


def next_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over the predictions of each sequence (B)."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), next_labels(labels).flatten(), ignore_index=NOT_PREDICTED, reduction="none"
    )
    return losses.view_as(labels).sum(1)


def instead_of_labels(
    logits: torch.Tensor, labels: torch.Tensor, teacher: tuple[torch.Tensor, ...], temperature: float
) -> torch.Tensor:
    """The divergence from the teacher less the next token's loss, summed over predictions.

    `teacher` is its logits (B, T, vocabulary), or the indices and logarithms of its highest probabilities (B, T, k).
    Its vocabulary may be the beginning of the model's.
    """
    parts = (tensor.flatten(0, 1).split(ROWS) for tensor in (next_labels(labels), logits, *teacher))
    again = partial(checkpoint, _exchange, use_reentrant=False, preserve_rng_state=False)
    total = logits.new_zeros((), dtype=torch.float32)
    for targets, own, *expected in zip(*parts, strict=True):
        total = total + again(targets, own, expected, temperature)
    return total


def _exchange(
    targets: torch.Tensor, logits: torch.Tensor, expected: list[torch.Tensor], temperature: float
) -> torch.Tensor:
    plain = functional.log_softmax(logits.float(), dim=-1)
    if len(expected) == 2:
        distance = _divergence(*(_with_rest(x) for x in (plain.gather(-1, expected[0].long()), expected[1].float())))
    elif temperature == 1:
        distance = _divergence(plain, functional.log_softmax(expected[0].float(), dim=-1))
    else:
        found, wanted = (functional.log_softmax(x.float() / temperature, dim=-1) for x in (logits, expected[0]))
        distance = _divergence(found, wanted) * temperature**2  # so that the gradient keeps its size
    likelihood = plain.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (distance + likelihood)[targets != NOT_PREDICTED].sum()


def _divergence(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The KL divergence of logarithms of probabilities; what the teacher does not know has probability zero."""
    return (wanted.exp() * (wanted - found[..., : wanted.shape[-1]])).sum(-1)


def _with_rest(logarithms: torch.Tensor) -> torch.Tensor:
    """With what is left to one as one more outcome."""
    left = 1 - logarithms.exp().sum(-1, keepdim=True)
    return torch.cat([logarithms, left.clamp_min(torch.finfo(left.dtype).eps).log()], dim=-1)


def attention_errors(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
    """By sequence (B), the squared error of attention outputs (B, T, width) beside their size; mean over layers."""
    errors = [
        (mine.float() - theirs.float()).square().sum((1, 2)) / theirs.float().square().sum((1, 2)).clamp_min(1e-12)
        for mine, theirs in zip(found, wanted, strict=True)
    ]
    return torch.stack(errors).mean(0)


@contextmanager
def attention_outputs(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """What each layer's attention gives during a call, in the order of the layers."""
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0])

    layers = [module for name, module in model.named_modules() if name.endswith(".self_attn")]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
