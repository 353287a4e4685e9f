"""The loss after D tokens as a power law: `L(D) = (Dc / D)^a + L0` (MEA, appendix D, equation 35).

For one exponent the rest is linear, `A D^-a + L0`, and has a closed form: what is left is a search over one number.
Points far from the curve, such as spikes, count less (Huber's weights), so that a few of them do not bend it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]

LEAST_POINTS = 5
"""Two more than the curve has numbers."""
EXPONENTS = (0.02, 4.0)
COARSE, FINE, NARROWER = 60, 12, 4
"""Exponents tried at first, then as often as this, each time between the neighbours of the best."""
ROUNDS, TOLERATED = 20, 1.345
"""Of weighting; and how many standard deviations off a point counts in full."""
EXACT = 1e-9
"""Points that are so near the curve, as part of the loss, are on it."""


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted curve."""

    tokens: float
    """Dc."""
    exponent: float
    """a."""
    floor: float
    """L0, the loss that no number of tokens goes below."""
    error: float
    """The standard error of the fitted loss at the last point."""

    def loss(self, tokens: float) -> float:
        """After so many tokens."""
        return float((self.tokens / tokens) ** self.exponent + self.floor)


def fit_scaling_law(tokens: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """The curve through losses after so many tokens; neither the loss it falls from nor its floor is negative."""
    if len(tokens) != len(losses) or len(set(tokens)) < LEAST_POINTS:
        raise ValueError(f"{len(set(tokens))} points are too few for a curve: use {LEAST_POINTS} or more")
    x, y = (np.asarray(numbers, dtype=np.float64) for numbers in (tokens, losses))
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all()):
        raise ValueError("a curve needs finite losses after more than 0 tokens")
    last = x.max()
    weights = np.ones_like(y)
    for _ in range(ROUNDS):
        exponent, height, floor = _search(x / last, y, weights)
        apart = np.abs(height * (x / last) ** -exponent + floor - y)
        spread = 1.4826 * np.median(apart)  # the standard deviation, were the noise normal
        if spread < EXACT * np.abs(y).max():
            break
        before, weights = weights, TOLERATED * spread / np.maximum(apart, TOLERATED * spread)
        if np.abs(weights - before).max() < 1e-3:
            break
    error = spread * _leverage(x / last, weights, exponent) ** 0.5
    return ScalingLaw(float(last * height ** (1 / exponent)), exponent, floor, float(error))


def _leverage(x: Numbers, weights: Numbers, exponent: float) -> float:
    """The variance of the fitted loss at 1, the last point, beside that of one point.

    As a change of height, floor and exponent moves it; the exponent's is there even of a flat curve, which has none.
    """
    moves = np.stack([x**-exponent, np.ones_like(x), x**-exponent * np.log(x)], axis=1)
    at_last = np.array([1.0, 1.0, 0.0])
    return float(at_last @ np.linalg.pinv(moves.T @ (weights[:, None] * moves)) @ at_last)


def _search(x: Numbers, y: Numbers, weights: Numbers) -> tuple[float, float, float]:
    """Exponent, height at 1 and floor with the least weighted squares."""
    tried = np.geomspace(*EXPONENTS, COARSE)
    for _ in range(NARROWER + 1):
        found = [_closed_form(x**-exponent, y, weights) for exponent in tried]
        best = int(np.argmin([squares for squares, _, _ in found]))
        exponent, (_, height, floor) = float(tried[best]), found[best]
        tried = np.geomspace(tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)], FINE)
    return exponent, height, floor


def _closed_form(x: Numbers, y: Numbers, weights: Numbers) -> tuple[float, float, float]:
    """Weighted squares, height and floor of the best line `height x + floor` with neither of them negative."""
    total = weights.sum()
    mean_x, mean_y = (weights @ x) / total, (weights @ y) / total
    spread = weights @ (x - mean_x) ** 2
    slope = float(weights @ ((x - mean_x) * (y - mean_y)) / spread)
    lines = [(slope, float(mean_y - slope * mean_x)), (float(weights @ (x * y) / (weights @ x**2)), 0.0)]
    lines = [(0.0, float(mean_y)), *(line for line in lines if min(line) >= 0)]
    return min((float(weights @ (height * x + floor - y) ** 2), height, floor) for height, floor in lines)
