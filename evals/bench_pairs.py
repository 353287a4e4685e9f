"""Two callables timed in turn: how long each takes, and the ratio of neighbours.

A ratio is that of two runs that follow each other, which share what the machine does at that moment; which one goes
first alternates.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

WARM_UPS = 2


def compare(ours: Callable[[], object], rival: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Seconds of each run of both, their ratios, and medians of these; both have run before the clock starts."""
    for _ in range(WARM_UPS):
        seconds(ours)
        seconds(rival)
    found: dict[str, list[float]] = {"ours": [], "rival": []}
    for turn in range(rounds):
        for side in ("ours", "rival") if turn % 2 else ("rival", "ours"):
            found[side].append(seconds(ours if side == "ours" else rival))
    return figures(found["ours"], found["rival"])


def seconds(run: Callable[[], object]) -> float:
    """How long one run takes, until the accelerator, where there is one, is done with it."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the accelerator has done all it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def figures(ours: list[float], rival: list[float]) -> dict[str, Any]:
    """The runs of both, in the order in which they were timed, and what they say."""
    ratios = [mine / theirs for mine, theirs in zip(ours, rival, strict=True)]
    return {
        "ours": ours,
        "rival": rival,
        "median_ours": median(ours),
        "median_rival": median(rival),
        "ratios": ratios,
        "median_ratio": median(ratios),
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
    }
