"""The sampling order of a run: sample n is a function of the seed and n alone.

A run that resumes at sample n, with any number of processes, continues with the samples of an uninterrupted run,
without reading those before. Each source has its own order in each epoch. After any number of samples, each source has
had its share, to within one sample.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from crosshead.common.errors import RecipeError

LONGEST_PERIOD = 100_000
"""The maximum number of samples after which the order of sources repeats."""
ROUNDS = 6
SMALLEST_HALF = 3
"""Bits. With fewer bits or rounds, the permutations of a few windows are not equally likely."""


def shuffled(key: str, count: int, index: int) -> int:
    """The image of `index` under a permutation of `range(count)` that the key determines.

    A Feistel network permutes the numbers with an even number of bits; it is applied again to results of `count` or
    more. That takes less than four tries on average, except for a few windows.
    """
    half = max(SMALLEST_HALF, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for step in range(ROUNDS):
            digest = blake2b(f"{key} {step} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = left << half | right
        if index < count:
            return index


class SourceOrder:
    """The source of each sample: after any number of samples each source has had its share, to within one.

    Sample `i` (from 0) of a source with `u` of a period's `p` samples has a release time, `i * p / u` rounded down,
    and a deadline, `(i + 1) * p / u` rounded up. Earliest deadline first finds a schedule, which always exists.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        units = [int(share * scale) for share in shares]
        self.units = [unit // gcd(*units) for unit in units]
        """Samples of each source in a period."""
        self.period = sum(self.units)
        if self.period > LONGEST_PERIOD:
            raise RecipeError(
                f"the sources' weights {list(weights)} repeat only after {Decimal(self.period):.6g} windows, "
                f"more than {LONGEST_PERIOD}: give shares that need fewer digits, such as 61.28 and 38.72"
            )
        self._source = np.empty(self.period, np.int32)
        self._number = np.empty(self.period, np.int32)  # of the source's samples in the period
        waiting, ready = [(0, source) for source in range(len(units))], list[tuple[int, int]]()
        taken = [0] * len(units)
        for index in range(self.period):
            while waiting and waiting[0][0] <= index:
                source = heappop(waiting)[1]
                heappush(ready, (-(-(taken[source] + 1) * self.period // self.units[source]), source))
            source = heappop(ready)[1]
            self._source[index], self._number[index] = source, taken[source]
            taken[source] += 1
            if taken[source] < self.units[source]:
                heappush(waiting, (taken[source] * self.period // self.units[source], source))

    def source(self, index: int) -> tuple[int, int]:
        """The source of a sample, and the number of its samples before."""
        periods, place = divmod(index, self.period)
        source = int(self._source[place])
        return source, periods * self.units[source] + int(self._number[place])


class SampleOrder:
    """The windows of a run: each source is shuffled in each of its epochs, and sources take turns by weight."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._windows, self._seed = list(windows), seed
        self._sources = SourceOrder(weights)

    def sample(self, index: int) -> tuple[int, int]:
        """The source and the window of a sample, counted from 0 over the whole run."""
        source, draw = self._sources.source(index)
        epoch, place = divmod(draw, self._windows[source])
        return source, shuffled(f"{self._seed} {source} {epoch}", self._windows[source], place)
