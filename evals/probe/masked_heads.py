"""Measures the loss of a model with random heads masked in each layer, as in figure 6 of the KHA paper.

The output of a masked head is set to zero before the output projection. A head is a group of `head_dim` inputs of that
projection, also if a mechanism combines two heads into one output.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from crosshead.common.errors import EvalError
from crosshead.common.progress import Advance

MAXIMUM_COUNTS = 9
"""Maximum number of different counts of masked heads."""
STRIDE = 1_000_003
"""Distance between the seeds of different counts, so that each draw has a seed of its own."""


def counts_to_mask(heads: int) -> list[int]:
    """Return evenly spaced counts of masked heads, from 0 to all heads but one."""
    steps = min(heads, MAXIMUM_COUNTS)
    return sorted({round(step * (heads - 1) / max(1, steps - 1)) for step in range(steps)})


def head_counts(model: Any) -> list[int]:
    """Return the number of heads of each layer, as its output projection reads them."""
    config = model.config
    size = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return [layer.self_attn.o_proj.in_features // size for layer in model.model.layers]


@torch.no_grad()
def masked_heads(
    model: Any, tokens: torch.Tensor, counts: Sequence[int], draws: int, seed: int, advance: Advance
) -> list[dict[str, Any]]:
    """Return the losses on token windows (B, T) for each count of masked heads: one loss per draw, and their mean."""
    rows: list[dict[str, Any]] = []
    times = {count: draws if count else 1 for count in counts}
    done, total = 0, sum(times.values())
    for count in counts:
        losses = []
        for draw in range(times[count]):
            generator = torch.Generator().manual_seed(((seed * STRIDE + count) * STRIDE + draw) % 2**64)
            with _masked(model, count, generator):
                losses.append(_loss(model, tokens))
            done += 1
            advance(done, total)
        rows.append({"masked": count, "loss": mean(losses), "losses": losses})
    return rows


def lines(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[tuple[float, float]]]:
    """Return the lines of the plot: model name -> points (count of masked heads, mean loss)."""
    return {name: [(row["masked"], row["loss"]) for row in rows] for name, rows in reports.items()}


@contextmanager
def _masked(model: Any, count: int, generator: torch.Generator) -> Iterator[None]:
    with ExitStack() as stack:
        for layer, heads in zip(model.model.layers, head_counts(model), strict=True):
            mask = torch.ones(heads)
            mask[torch.randperm(heads, generator=generator)[:count]] = 0
            stack.enter_context(layer.self_attn.o_proj.register_forward_pre_hook(partial(_mask_heads, mask)))
        yield


def _mask_heads(mask: torch.Tensor, module: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    outputs = arguments[0].unflatten(-1, (len(mask), -1))
    return ((outputs * mask.to(outputs).unsqueeze(-1)).flatten(-2),)


def _loss(model: Any, tokens: torch.Tensor) -> float:
    losses = []
    for window in tokens.to(model.device).split(1):
        logits = model(window, use_cache=False).logits[0, :-1].float()
        losses.append(float(functional.cross_entropy(logits, window[0, 1:])))
    if not isfinite(loss := mean(losses)):
        raise EvalError(f"the loss of {model.config._name_or_path} is {loss}: its weights are damaged")
    return loss
