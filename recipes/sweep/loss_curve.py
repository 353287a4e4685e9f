"""Loss curve of a finished run: fitted power law, number of spikes, and rise at the end.

The loss after D tokens is `L(D) = (Dc / D)^a + L0` (MEA, appendix D, equation 35). For a fixed exponent `a`, the fit
of height and floor is a linear least-squares problem, so that the search is one-dimensional. Huber weights limit the
effect of outliers such as spikes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np

from crosshead.common.errors import DivergedError

from ..schema.recipe import Recipe
from ..trainer.metrics import MIN_DIVERGENCE, MIN_SPIKE, PATIENCE, RECENT, SPIKE, LossMonitor, MetricsFile

HELD_OUT, TRAINING = "held-out", "training"
MIN_POINTS = 5
"""Minimum number of points of a curve: two more than it has parameters."""
EXPONENTS = np.geomspace(0.02, 4.0, 60)
"""Grid of exponents; the search continues between the neighbours of the best one."""
MIN_PATIENCE = 3
"""Minimum number of consecutive high losses by which a short run counts as diverged."""
ROUNDS, HUBER = 20, 1.345
"""Maximum number of reweighting rounds, and Huber threshold in standard deviations."""
EXACT = 1e-9
"""Residuals below this fraction of the loss count as zero."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LossCurve:
    """Losses of a run, each with the number of training tokens up to and including its step."""

    tokens: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def window(self) -> int:
        """Number of losses at the end to average; 0 for a short curve."""
        return min(RECENT, len(self.losses) // 5)

    @property
    def last_loss(self) -> float:
        """Mean of the last losses."""
        return mean(self.losses[-max(1, self.window) :])


@dataclass(frozen=True)
class ScalingLaw:
    """Fitted power law `L(D) = (tokens / D)^exponent + floor`."""

    tokens: float
    """Dc, the scale of the power law in tokens."""
    exponent: float
    """a, the exponent."""
    floor: float
    """L0, the limit of the loss for infinitely many tokens."""
    error: float
    """Standard error of the fitted loss at the last point."""

    def loss(self, tokens: float) -> float:
        """Return the loss after training on a number of tokens."""
        return float((self.tokens / tokens) ** self.exponent + self.floor)


def curve_start(run: Recipe) -> int:
    """Return the step after which the curve begins: after the warmup, and after steps with an attention loss."""
    return max(run.warmup_steps, run.attention_loss_steps)


def loss_kind(recipe: Recipe) -> str:
    """Return the kind of loss to fit: held-out, as in the paper, if evaluated often enough; otherwise training."""
    every = recipe.watch.evaluate_every
    points = (recipe.steps - curve_start(recipe)) // every if every else 0
    return HELD_OUT if points >= MIN_POINTS else TRAINING


def loss_curve(run: Recipe, kind: str) -> LossCurve:
    """Return the losses of a run after `curve_start`, of the kind `HELD_OUT` or `TRAINING`."""
    lines = MetricsFile.lines(Path(run.output))
    points = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    if kind == TRAINING:
        points = dict(enumerate(MetricsFile.losses(Path(run.output), run.steps), 1))
    after = sorted((step, loss) for step, loss in points.items() if step > curve_start(run))
    return LossCurve(tuple(step * run.per_step for step, _ in after), tuple(loss for _, loss in after))


def count_spikes(run: Recipe) -> int:
    """Return the number of spikes in the training loss of a run."""
    monitor = LossMonitor(run.loss_changes)
    with suppress(DivergedError):
        monitor.update(MetricsFile.losses(Path(run.output), run.steps), 1)
    return monitor.spikes


def divergence(run: Recipe) -> str:
    """Return why a run counts as diverged, or "".

    In a short run, a loss that is too high for a tenth of the run is enough: a power law does not describe the curve,
    even if the loss fell again.
    """
    try:
        monitor = LossMonitor(run.loss_changes, min(PATIENCE, max(MIN_PATIENCE, run.steps // 10)))
        monitor.update(MetricsFile.losses(Path(run.output), run.steps), 1)
    except DivergedError as error:
        return str(error)
    return ""


def final_rise(run: Recipe) -> float:
    """Return the rise of the averaged training loss from its minimum to the end; 0 if it may be noise.

    If the final average is more than `MIN_DIVERGENCE` above the first loss of this kind, that of the first step after
    the attention losses, return that rise. Smaller rises above it do not count, as a single loss may be low by chance.
    """
    curve = loss_curve(run, TRAINING)
    losses, window = curve.losses, curve.window
    if not window:
        return 0.0
    averages = [mean(losses[end - window : end]) for end in range(len(losses), window - 1, -window)]
    rise = averages[0] - MetricsFile.losses(Path(run.output), run.steps)[run.attention_loss_steps]
    if rise > MIN_DIVERGENCE:
        return rise
    rise, noise = averages[0] - min(averages[1:]), pstdev(losses[-window:]) * (2 / window) ** 0.5
    return rise if window > 1 and rise > max(MIN_SPIKE, SPIKE * noise) else 0.0


def fit_scaling_law(tokens: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """Fit the power law, with non-negative height and floor, to losses after numbers of tokens."""
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
        deviation = 1.4826 * np.median(residuals)  # estimates the standard deviation of normal noise
        if deviation < EXACT * np.abs(y).max():
            break
        before, weights = weights, HUBER * deviation / np.maximum(residuals, HUBER * deviation)
        if np.abs(weights - before).max() < 1e-3:
            break
    error = deviation * _variance_at_last(x / last, weights, exponent) ** 0.5
    return ScalingLaw(float(last * height ** (1 / exponent)), exponent, floor, float(error))


def _fit(x: Numbers, y: Numbers, weights: Numbers) -> tuple[float, float, float]:
    """Return the exponent, height at x = 1 and floor that minimise the weighted squared error."""
    from scipy.optimize import minimize_scalar, nnls

    root = np.sqrt(weights)

    def solve(exponent: float) -> Any:
        return nnls(np.stack([x**-exponent, np.ones_like(x)], axis=1) * root[:, None], y * root)

    best = int(np.argmin([solve(exponent)[1] for exponent in EXPONENTS]))
    bounds = EXPONENTS[max(0, best - 1)], EXPONENTS[min(len(EXPONENTS) - 1, best + 1)]
    exponent = float(minimize_scalar(lambda value: solve(value)[1] ** 2, bounds=bounds, options={"xatol": 1e-9}).x)
    height, floor = solve(exponent)[0].tolist()
    return exponent, height, floor


def _variance_at_last(x: Numbers, weights: Numbers, exponent: float) -> float:
    """Return the variance of the fitted loss at the last point (x = 1), relative to the variance of one point.

    It accounts for the uncertainty of height, floor and exponent, where the exponent counts even for a flat curve.
    """
    gradients = np.stack([x**-exponent, np.ones_like(x), x**-exponent * np.log(x)], axis=1)
    at_last = np.array([1.0, 1.0, 0.0])
    return float(at_last @ np.linalg.pinv(gradients.T @ (weights[:, None] * gradients)) @ at_last)
