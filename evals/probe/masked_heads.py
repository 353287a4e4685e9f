"""How much a model needs each of its heads: the loss with some of them masked at random (figure 6 of the KHA paper).

In every layer the outputs of as many heads, drawn anew for each layer, are set to zero before the output projection. A
head is what that projection reads as one: `head_dim` numbers, also where a mechanism joins two heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

MOST_COUNTS = 9
STRIDE = 1_000_003
"""Between seeds, so that no two draws share theirs."""
Advance = Callable[[int, int], None]
"""Told the losses that are measured, of all."""


def counts_to_mask(heads: int) -> list[int]:
    """From none to all but one, not too many."""
    steps = min(heads, MOST_COUNTS)
    return sorted({round(step * (heads - 1) / max(1, steps - 1)) for step in range(steps)})


@torch.no_grad()
def masked_heads(
    model: Any, tokens: torch.Tensor, counts: Sequence[int], draws: int, seed: int, advance: Advance
) -> list[dict[str, Any]]:
    """The loss on windows of tokens (B, T) with so many heads masked in every layer, for some draws of heads."""
    rows: list[dict[str, Any]] = []
    times = {count: draws if count else 1 for count in counts}
    done, total = 0, sum(times.values())
    for count in counts:
        losses = []
        for draw in range(times[count]):
            generator = torch.Generator().manual_seed((seed * STRIDE + count) * STRIDE + draw)
            with _masked(model, count, generator):
                losses.append(_loss(model, tokens))
            done += 1
            advance(done, total)
        rows.append({"masked": count, "loss": mean(losses), "losses": losses})
    return rows


def lines(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[tuple[float, float]]]:
    """What a plot shows of each model: mean losses by the count of masked heads."""
    return {name: [(row["masked"], row["loss"]) for row in rows] for name, rows in reports.items()}


@contextmanager
def _masked(model: Any, count: int, generator: torch.Generator) -> Iterator[None]:
    heads, hooks = model.config.num_attention_heads, []
    for layer in model.model.layers:
        kept = torch.ones(heads)
        kept[torch.randperm(heads, generator=generator)[:count]] = 0
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(partial(_mask, kept)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mask(kept: torch.Tensor, module: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    outputs = arguments[0].unflatten(-1, (len(kept), -1))
    return ((outputs * kept.to(outputs).unsqueeze(-1)).flatten(-2),)


def _loss(model: Any, tokens: torch.Tensor) -> float:
    losses = []
    for window in tokens.to(model.device).split(1):
        logits = model(window, use_cache=False).logits[0, :-1].float()
        losses.append(float(functional.cross_entropy(logits, window[0, 1:])))
    return mean(losses)
