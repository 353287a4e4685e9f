"""The two tiers of tests: `make test` (the default tier) skips tests marked slow, `make test-all` runs everything.

A grid of cases runs completely in the slow tier; the default tier runs a small covering subset.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return test parameters: the first `count` values run in the default tier, the others are marked slow."""
    return [
        value if number < count else pytest.param(value, marks=pytest.mark.slow) for number, value in enumerate(values)
    ]


def grid(*axes: Iterable[Any], strength: int = 2) -> list[Any]:
    """Return every combination of the values as test parameters; all but a covering set are marked slow.

    With `strength` 2 the default tier contains each pair of values of any two axes at least once (pairwise testing),
    with 1 each value.
    """
    values = [list(axis) for axis in axes]
    default = _covering([len(axis) for axis in values], strength)
    return [
        pytest.param(*combination, marks=() if number in default else (pytest.mark.slow,))
        for number, combination in enumerate(product(*values))
    ]


def covering(*axes: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return the combinations that `grid` leaves in the default tier."""
    values = [list(axis) for axis in axes]
    default = _covering([len(axis) for axis in values], strength)
    return [combination for number, combination in enumerate(product(*values)) if number in default]


def oldest(cases: Sequence[Any]) -> list[Any]:
    """Return the cases of a grid; one default case per value of the first argument is also marked `oldest`."""
    chosen = {case.values[0]: case for case in reversed(cases) if not case.marks}.values()
    return [pytest.param(*case.values, marks=pytest.mark.oldest) if case in chosen else case for case in cases]


def _covering(sizes: Sequence[int], strength: int) -> set[int]:
    """Return numbers of few combinations that cover every choice on `strength` axes (greedy, deterministic)."""
    everything = list(enumerate(product(*map(range, sizes))))
    random.Random(0).shuffle(everything)
    missing = {choice for _, combination in everything for choice in _choices(combination, strength)}
    default = set()
    while missing:
        number, best = max(everything, key=lambda entry: len(missing.intersection(_choices(entry[1], strength))))
        default.add(number)
        missing.difference_update(_choices(best, strength))
    return default


def _choices(combination: tuple[int, ...], strength: int) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(combination), min(strength, len(combination))))
