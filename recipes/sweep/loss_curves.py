"""The loss curve of a finished run, and whether the run was stable."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev

from crosshead.common.errors import RecipeError

from ..schema.recipe import Recipe
from ..trainer.metrics import LEAST_RUNAWAY, LEAST_SPIKE, RECENT, SPIKE, LossWatch, MetricsFile
from .scaling_law import LEAST_POINTS

HELD_OUT, TRAINING = "held-out", "training"


@dataclass(frozen=True)
class LossCurve:
    """Losses of a run, after so many tokens each."""

    tokens: tuple[int, ...]
    losses: tuple[float, ...]


def kind_of_loss(recipe: Recipe) -> str:
    """Held-out loss, which the paper fits, where the recipe evaluates often enough for a curve; or training loss."""
    every = recipe.watch.evaluate_every
    points = (recipe.steps - begin(recipe)) // every if every else 0
    return HELD_OUT if points >= LEAST_POINTS else TRAINING


def loss_curve(run: Recipe, kind: str) -> LossCurve:
    """After the warmup, which bends a curve by itself, and after the steps of another objective."""
    if kind == HELD_OUT:
        lines = MetricsFile.lines(Path(run.output))
        points = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    else:
        points = dict(enumerate(MetricsFile.losses(Path(run.output), run.steps), 1))
    kept = sorted((step, loss) for step, loss in points.items() if step > begin(run))
    return LossCurve(
        tokens=tuple(step * run.train.batch_tokens for step, _ in kept), losses=tuple(loss for _, loss in kept)
    )


def begin(run: Recipe) -> int:
    """The step behind which the curve begins."""
    return max(run.warmup_steps, _other_until(run))


def _other_until(run: Recipe) -> int:
    """The last step of another objective."""
    return run.distillation.match_steps if run.distillation else 0


def spikes(run: Recipe) -> int:
    """How many the run had; they may well have passed."""
    watch = LossWatch(_other_until(run))
    with suppress(RecipeError):  # where the run diverged, it has ended
        watch.see(MetricsFile.losses(Path(run.output), run.steps), 1)
    return watch.spikes


def rise(run: Recipe) -> float:
    """By how much the training loss ends above its lowest, both averaged over steps; 0 where that may be chance.

    Or above its first, which is that of a model that no step has spoilt; one loss alone may be low by chance.
    """
    losses = loss_curve(run, TRAINING).losses
    window = min(RECENT, len(losses) // 5)
    if not window:
        return 0.0
    risen = mean(losses[-window:]) - MetricsFile.losses(Path(run.output), run.steps)[_other_until(run)]
    if risen > LEAST_RUNAWAY:
        return risen
    if window < 2:
        return 0.0
    last, *before = (losses[end - window : end] for end in range(len(losses), window - 1, -window))
    risen = mean(last) - min(map(mean, before))
    return risen if risen > max(LEAST_SPIKE, SPIKE * pstdev(last) * (2 / window) ** 0.5) else 0.0
