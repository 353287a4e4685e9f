"""Measures two callables in turn, and computes the ratio of each pair of neighbouring runs.

Neighbouring runs share the state of the machine. The order within a pair alternates.
"""

import time
from collections.abc import Callable
from math import ceil
from statistics import median, quantiles
from typing import Any

import torch

WARM_UPS = 2
"""Number of runs before the measurement."""
MIN_SECONDS = 0.2
"""Approximate minimum duration of a reading: shorter runs are repeated, because the clock is not precise enough."""
Run = Callable[[], object]
"""Does the work of one side once."""
Reading = Callable[[], float]
"""Runs one side and returns its measurement: seconds or bytes."""


def timed(run: Run) -> Reading:
    """Warm up a run and return its reading in seconds; a short run is repeated and the mean is taken."""
    last = [seconds(run) for _ in range(WARM_UPS)][-1]
    times = max(1, ceil(MIN_SECONDS / max(last, 1e-6)))
    return lambda: seconds(run, times)


def measure_alternating(
    ours: Reading, baseline: Reading, rounds: int, advance: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Take readings of both sides in turn and return their statistics; `advance` is called after each round."""
    readings: dict[str, list[float]] = {"ours": [], "baseline": []}
    for turn in range(rounds):
        for side in ("ours", "baseline") if turn % 2 else ("baseline", "ours"):
            readings[side].append(ours() if side == "ours" else baseline())
        advance()
    return figures(readings["ours"], readings["baseline"])


def seconds(run: Run, times: int = 1) -> float:
    """Return the mean time of a run in seconds, until the accelerator has finished its work."""
    synchronize = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize()
    return (time.perf_counter() - start) / times


def figures(ours: list[float], baseline: list[float]) -> dict[str, Any]:
    """Return the readings of both sides in the order of the rounds, and the statistics of their ratios."""
    ratios = [mine / theirs for mine, theirs in zip(ours, baseline, strict=True)]
    first, _, third = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return {
        "ours": ours,
        "baseline": baseline,
        "median_ours": median(ours),
        "median_baseline": median(baseline),
        "ratios": ratios,
        "median_ratio": median(ratios),
        "quartile_ratios": [first, third],
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
    }
