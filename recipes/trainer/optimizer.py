"""The optimizer's parameter groups: mechanisms have their own, with a learning rate and a weight decay of their own.

A map that starts as the identity means something else when it shrinks: decay would pull it towards zero, which is no
head at all, and not towards the stock model. So mechanisms do not decay unless the recipe says so.
"""

from collections.abc import Collection
from math import cos, pi
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..schema.recipe import Recipe
from ..schema.sections import TrainOptions
from .trainable import is_new


def separate_mechanisms(
    optimizer: Optimizer, model: nn.Module, decaying: Collection[str], options: TrainOptions
) -> None:
    """Move parameters of mechanisms out of the optimizer's groups into new ones behind them; none is left empty.

    `decaying` are the names of what weight decay is for, in any group: norms and biases are not among them. All groups
    share the schedule, which multiplies each group's learning rate.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    stock: list[dict[str, Any]] = []
    mechanisms: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        stock.append(group | {"params": [part for part in group["params"] if not is_new(names[part])]})
        for decays in (True, False):
            parts = [part for part in group["params"] if is_new(names[part]) and (names[part] in decaying) == decays]
            decay = options.mechanisms.weight_decay if decays else 0.0
            mechanisms.append(group | {"params": parts, "lr": options.mechanism_rate, "weight_decay": decay})
    optimizer.param_groups = [group for group in (*stock, *mechanisms) if group["params"]]


def rate(recipe: Recipe, step: int) -> float:
    """The part of `train.learning_rate` that step number `step`, from 0, takes."""
    train, warmup = recipe.train, recipe.warmup_steps
    if step < warmup:
        start = train.warmup_from / train.learning_rate
        return start + (1 - start) * (step + 1) / warmup
    if train.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, recipe.steps - 1 - warmup))
    return train.final_ratio + (1 - train.final_ratio) * (1 + cos(pi * done)) / 2
