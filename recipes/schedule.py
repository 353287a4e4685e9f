"""The learning rate of every step, as part of the highest: a function of the step alone."""

from math import cos, pi

from .schema import Recipe


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
