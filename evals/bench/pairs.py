"""Two callables timed in turn: how long each takes, and the ratio of neighbours.

A ratio is that of two runs that follow each other, which share what the machine does at that moment; which one goes
first alternates.
"""

import time
from collections.abc import Callable
from math import ceil
from statistics import median, quantiles
from typing import Any

import torch

WARM_UPS = 2
LEAST_SECONDS = 0.2
"""What takes less is repeated until it takes about this long, so that the clock is no part of it."""
Run = Callable[[], object]
Reading = Callable[[], float]
"""Runs one side and gives what that took: seconds, or bytes."""


def compare(ours: Run, rival: Run, rounds: int) -> dict[str, Any]:
    """Seconds of each run of both, their ratios, and medians of these; both have run before the clock starts."""
    return in_turn(timed(ours), timed(rival), rounds)


def timed(run: Run) -> Reading:
    """A clock for a run, warmed up; a short one is timed several times at once."""
    last = [seconds(run) for _ in range(WARM_UPS)][-1]
    times = max(1, ceil(LEAST_SECONDS / max(last, 1e-6)))
    return lambda: seconds(run, times)


def in_turn(
    ours: Reading, rival: Reading, rounds: int, advance: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Readings of both and what they say; `advance` is called after each round."""
    found: dict[str, list[float]] = {"ours": [], "rival": []}
    for turn in range(rounds):
        for side in ("ours", "rival") if turn % 2 else ("rival", "ours"):
            found[side].append(ours() if side == "ours" else rival())
        advance()
    return figures(found["ours"], found["rival"])


def seconds(run: Run, times: int = 1) -> float:
    """How long one run takes, until the accelerator, where there is one, is done with it; the mean of several."""
    wait()
    start = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - start) / times


def wait() -> None:
    """Until the accelerator has done all it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def figures(ours: list[float], rival: list[float]) -> dict[str, Any]:
    """The runs of both, in the order in which they were measured, and what they say."""
    ratios = [mine / theirs for mine, theirs in zip(ours, rival, strict=True)]
    first, _, third = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return {
        "ours": ours,
        "rival": rival,
        "median_ours": median(ours),
        "median_rival": median(rival),
        "ratios": ratios,
        "median_ratio": median(ratios),
        "quartile_ratios": [first, third],
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
    }
