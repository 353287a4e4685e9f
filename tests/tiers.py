"""The two tiers of tests: `make test` leaves out what is marked slow, `make test-all` runs everything.

A grid keeps all of its cases in the slow tier. In the default tier it keeps a few that cover it.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters of a test: the first `count` values in the default tier, the others in the slow one."""
    return [
        value if place < count else pytest.param(value, marks=pytest.mark.slow) for place, value in enumerate(values)
    ]


def grid(*axes: Iterable[Any], strength: int = 2) -> list[Any]:
    """Parameters of a test with several arguments: every combination, of which a covering set is in the default tier.

    With `strength` 2 each pair of values, of any two axes, is in the default tier at least once (pairwise testing);
    with 1 each value is. The other combinations are marked slow.
    """
    values = [list(axis) for axis in axes]
    kept = _covering([len(axis) for axis in values], strength)
    return [
        pytest.param(*combination, marks=() if place in kept else (pytest.mark.slow,))
        for place, combination in enumerate(product(*values))
    ]


def covering(*axes: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """The combinations that `grid` leaves in the default tier."""
    values = [list(axis) for axis in axes]
    kept = _covering([len(axis) for axis in values], strength)
    return [combination for place, combination in enumerate(product(*values)) if place in kept]


def oldest(cases: Sequence[Any]) -> list[Any]:
    """The parameters of a grid; one for each value of the first argument also runs with the oldest transformers."""
    chosen = {case.values[0]: case for case in reversed(cases) if not case.marks}.values()
    return [pytest.param(*case.values, marks=pytest.mark.oldest) if case in chosen else case for case in cases]


def _covering(sizes: Sequence[int], strength: int) -> set[int]:
    """Which of all combinations hold each choice of places on `strength` axes: few, and the same ones in every run."""
    everything = list(enumerate(product(*map(range, sizes))))
    random.Random(0).shuffle(everything)
    missing = {choice for _, places in everything for choice in _choices(places, strength)}
    kept = set()
    while missing:
        number, best = max(everything, key=lambda each: len(missing.intersection(_choices(each[1], strength))))
        kept.add(number)
        missing.difference_update(_choices(best, strength))
    return kept


def _choices(places: tuple[int, ...], strength: int) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(places), min(strength, len(places))))
