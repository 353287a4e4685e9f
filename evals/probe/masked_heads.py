"""The loss of a model with some heads masked at random in each layer, as in figure 6 of the KHA paper.

The output of a masked head is set to zero before the output projection. A head is `head_dim` inputs of that
projection, also where a mechanism combines two heads.
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
STRIDE = 1_000_003
"""Between seeds, so that each draw has its own."""


def counts_to_mask(heads: int) -> list[int]:
    """Evenly spaced counts from 0 to all heads but one."""
    steps = min(heads, MAXIMUM_COUNTS)
    return sorted({round(step * (heads - 1) / max(1, steps - 1)) for step in range(steps)})


def head_counts(model: Any) -> list[int]:
    """The heads of each layer, as its output projection reads them."""
    config = model.config
    size = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    return [layer.self_attn.o_proj.in_features // size for layer in model.model.layers]


@torch.no_grad()
def masked_heads(
    model: Any, tokens: torch.Tensor, counts: Sequence[int], draws: int, seed: int, advance: Advance
) -> list[dict[str, Any]]:
    """The loss on windows of tokens (B, T) for each count of masked heads, and each draw of them."""
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
    """The lines of the plot: for each model, mean losses by count of masked heads."""
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
