"""Which window is the n-th of a run: a function of the seed and n, and of nothing that happened before.

So a run that is resumed at sample n, by whatever number of processes, sees what the uninterrupted one would have seen,
and asks for it at once. Each source is gone through in an order of its own, epoch after epoch; between the sources the
run changes so that after any number of samples each has had its share, to within one.
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
"""Samples after which the changing between sources must repeat."""
ROUNDS = 6
SMALLEST_HALF = 3
"""Bits. With fewer, or with fewer rounds, some orders of a handful of windows come more often than others."""


def shuffled(key: str, count: int, index: int) -> int:
    """Where a permutation of `range(count)`, chosen by the key, puts `index`.

    A Feistel network permutes the numbers of an even number of bits; one that it sends beyond `count` is sent on until
    it is below. That takes less than four tries on average, unless there is but a handful of windows.
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
    """Which source's turn it is: after any number of turns each has had its share of them, to within one.

    A source with `u` of a period's `p` turns takes its turn number `i` (from 0) no earlier than `i * p / u`, rounded
    down, and ends it no later than `(i + 1) * p / u`, rounded up. Whoever must end first goes first: for turns of one
    unit with such bounds there is always a schedule, and that rule finds it.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        units = [int(share * scale) for share in shares]
        self.units = [unit // gcd(*units) for unit in units]
        """How many turns each source has in a period."""
        self.period = sum(self.units)
        if self.period > LONGEST_PERIOD:
            raise RecipeError(
                f"the sources' weights {list(weights)} repeat only after {Decimal(self.period):.6g} windows, "
                f"{LONGEST_PERIOD} at most: give shares that need fewer digits, such as 61.28 and 38.72"
            )
        self._source = np.empty(self.period, np.int32)
        self._number = np.empty(self.period, np.int32)  # which of its turns in the period this is
        waiting, ready = [(0, source) for source in range(len(units))], list[tuple[int, int]]()
        taken = [0] * len(units)
        for turn in range(self.period):
            while waiting and waiting[0][0] <= turn:
                source = heappop(waiting)[1]
                heappush(ready, (-(-(taken[source] + 1) * self.period // self.units[source]), source))
            source = heappop(ready)[1]
            self._source[turn], self._number[turn] = source, taken[source]
            taken[source] += 1
            if taken[source] < self.units[source]:
                heappush(waiting, (taken[source] * self.period // self.units[source], source))

    def turn(self, index: int) -> tuple[int, int]:
        """The source of a turn, and how many turns it had before."""
        periods, place = divmod(index, self.period)
        source = int(self._source[place])
        return source, periods * self.units[source] + int(self._number[place])


class RunOrder:
    """The windows of a run: every source shuffled anew in each of its epochs, the sources by their weights."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self._windows, self._seed = list(windows), seed
        self._turns = SourceOrder(weights)

    def sample(self, index: int) -> tuple[int, int]:
        """The source and the window of sample `index`, counted from 0 over the whole run."""
        source, draw = self._turns.turn(index)
        epoch, place = divmod(draw, self._windows[source])
        return source, shuffled(f"{self._seed} {source} {epoch}", self._windows[source], place)
