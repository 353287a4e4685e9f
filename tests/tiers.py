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
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in kept else (pytest.mark.slow,),
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]


def _covering(sizes: Sequence[int], strength: int) -> set[tuple[int, ...]]:
    """Few combinations of places that hold each choice of places on `strength` axes; the same ones in every run."""
    everything = list(product(*(range(size) for size in sizes)))
    random.Random(0).shuffle(everything)
    missing = {choice for places in everything for choice in _choices(places, strength)}
    kept: set[tuple[int, ...]] = set()
    while missing:
        best = max(everything, key=lambda places: len(missing.intersection(_choices(places, strength))))
        kept.add(best)
        missing.difference_update(_choices(best, strength))
    return kept


def _choices(places: tuple[int, ...], strength: int) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(places), min(strength, len(places))))
