"""The loss curve of a finished run: a power law through it, spikes, and a rise at its end.

The loss after D tokens is `L(D) = (Dc / D)^a + L0` (MEA, appendix D, equation 35). For a given exponent, height and
floor are a linear problem, so that the search is over one number. Huber's weights limit the effect of outliers such as
spikes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from crosshead.common.errors import RecipeError

from ..schema.recipe import Recipe
from ..trainer.metrics import MIN_DIVERGENCE, MIN_SPIKE, RECENT, SPIKE, LossMonitor, MetricsFile

HELD_OUT, TRAINING = "held-out", "training"
MIN_POINTS = 5
"""Two more than the curve has parameters."""
EXPONENTS = np.geomspace(0.02, 4.0, 60)
"""Tried first; the search then continues between the neighbours of the best one."""
ROUNDS, HUBER = 20, 1.345
"""Maximum number of reweighting rounds, and Huber's threshold in standard deviations."""
EXACT = 1e-9
"""Residuals below this share of the loss count as zero."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LossCurve:
    """Numbers of tokens, and the loss after each."""

    tokens: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted power law."""

    tokens: float
    """Dc."""
    exponent: float
    """a."""
    floor: float
    """L0, the limit of the loss."""
    error: float
    """The standard error of the fitted loss at the last point."""

    def loss(self, tokens: float) -> float:
        """After a number of tokens."""
        return float((self.tokens / tokens) ** self.exponent + self.floor)


def curve_start(run: Recipe) -> int:
    """The step after which the curve begins: after the warmup, and after the steps with another loss."""
    return max(run.warmup_steps, run.attention_loss_steps)


def loss_kind(recipe: Recipe) -> str:
    """Held-out loss, as in the paper, if the recipe evaluates often enough for a curve; otherwise training loss."""
    every = recipe.watch.evaluate_every
    points = (recipe.steps - curve_start(recipe)) // every if every else 0
    return HELD_OUT if points >= MIN_POINTS else TRAINING


def loss_curve(run: Recipe, kind: str) -> LossCurve:
    """The losses of a run from the curve's start on."""
    lines = MetricsFile.lines(Path(run.output))
    points = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    if kind == TRAINING:
        points = dict(enumerate(MetricsFile.losses(Path(run.output), run.steps), 1))
    after = sorted((step, loss) for step, loss in points.items() if step > curve_start(run))
    return LossCurve(tuple(step * run.per_step for step, _ in after), tuple(loss for _, loss in after))


def count_spikes(run: Recipe) -> int:
    """The number of loss spikes."""
    monitor = LossMonitor(run.loss_changes)
    with suppress(RecipeError):  # of a run that diverged
        monitor.update(MetricsFile.losses(Path(run.output), run.steps), 1)
    return monitor.spikes


def final_rise(run: Recipe) -> float:
    """The rise of the averaged training loss from its minimum to the end; 0 if it may be noise.

    Or the rise from the first loss, that of the untrained model, if it is large: one loss alone may be low by chance.
    """
    losses = loss_curve(run, TRAINING).losses
    window = min(RECENT, len(losses) // 5)
    if not window:
        return 0.0
    averages = [mean(losses[end - window : end]) for end in range(len(losses), window - 1, -window)]
    rise = averages[0] - MetricsFile.losses(Path(run.output), run.steps)[run.attention_loss_steps]
    if rise > MIN_DIVERGENCE:
        return rise
    rise, noise = averages[0] - min(averages[1:]), pstdev(losses[-window:]) * (2 / window) ** 0.5
    return rise if window > 1 and rise > max(MIN_SPIKE, SPIKE * noise) else 0.0


def fit_scaling_law(tokens: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """The power law through losses after numbers of tokens; its height and its floor are not negative."""
    if len(tokens) != len(losses) or len(set(tokens)) < MIN_POINTS:
        raise ValueError(f"{len(set(tokens))} points are too few for a curve: use {MIN_POINTS} or more")
    x, y = (np.asarray(numbers, dtype=np.float64) for numbers in (tokens, losses))
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all()):
        raise ValueError("a curve needs finite losses after more than 0 tokens")
    last = x.max()
    weights = np.ones_like(y)
    for _ in range(ROUNDS):
        exponent, height, floor = _fit(x / last, y, weights)
        residuals = np.abs(height * (x / last) ** -exponent + floor - y)
        deviation = 1.4826 * np.median(residuals)  # the standard deviation, if the noise is normal
        if deviation < EXACT * np.abs(y).max():
            break
        before, weights = weights, HUBER * deviation / np.maximum(residuals, HUBER * deviation)
        if np.abs(weights - before).max() < 1e-3:
            break
    error = deviation * _variance_at_last(x / last, weights, exponent) ** 0.5
    return ScalingLaw(float(last * height ** (1 / exponent)), exponent, floor, float(error))


def _fit(x: Numbers, y: Numbers, weights: Numbers) -> tuple[float, float, float]:
    """Exponent, height at 1 and floor with the least weighted squares."""
    from scipy.optimize import minimize_scalar, nnls

    root = np.sqrt(weights)

    def solve(exponent: float) -> Any:
        return nnls(np.stack([x**-exponent, np.ones_like(x)], axis=1) * root[:, None], y * root)

    best = int(np.argmin([solve(exponent)[1] for exponent in EXPONENTS]))
    bounds = EXPONENTS[max(0, best - 1)], EXPONENTS[min(len(EXPONENTS) - 1, best + 1)]
    exponent = float(minimize_scalar(lambda each: solve(each)[1] ** 2, bounds=bounds, options={"xatol": 1e-9}).x)
    height, floor = solve(exponent)[0].tolist()
    return exponent, height, floor


def _variance_at_last(x: Numbers, weights: Numbers, exponent: float) -> float:
    """The variance of the fitted loss at 1, the last point, relative to that of one point.

    Of height, floor and exponent; that of the exponent also counts for a flat curve.
    """
    gradients = np.stack([x**-exponent, np.ones_like(x), x**-exponent * np.log(x)], axis=1)
    at_last = np.array([1.0, 1.0, 0.0])
    return float(at_last @ np.linalg.pinv(gradients.T @ (weights[:, None] * gradients)) @ at_last)
