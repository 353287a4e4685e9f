"""Sampling order of a run: the choice of sample n depends only on the seed and n.

A run that resumes at sample n, with any number of processes, continues with the same samples as an uninterrupted run,
without reading the earlier ones. Each source is shuffled anew in each of its epochs. After any number of samples,
each source has contributed its share, to within one sample.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from math import gcd, lcm

import numpy as np

from crosshead.common.errors import RecipeError

LONGEST_PERIOD = 100_000
"""Maximum period, in samples, of the order of sources."""
ROUNDS = 6
SMALLEST_HALF = 3
"""Minimum bits of a Feistel half. With fewer bits or rounds, permutations of few windows are not equally likely."""


def shuffled(key: str, count: int, index: int) -> int:
    """Return the image of `index` under a pseudorandom permutation of `range(count)` that the key determines.

    A Feistel network permutes all numbers with an even number of bits. It is applied again until the result is below
    `count` (cycle walking): fewer than four times on average, unless `count` is tiny.
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
    """Deterministic schedule of sources: after any number of samples each source has its share, to within one sample.

    A source has `u` of the `p` samples in a period. Its sample `i` (from 0) has the release time `floor(i * p / u)`
    and the deadline `ceil((i + 1) * p / u)`. A schedule always exists, and earliest-deadline-first finds it.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        units = [int(share * scale) for share in shares]
        self.units = [unit // gcd(*units) for unit in units]
        """Number of samples of each source in a period."""
        self.period = sum(self.units)
        if self.period > LONGEST_PERIOD:
            raise RecipeError(
                f"the sources' weights {list(weights)} repeat only after {Decimal(self.period):.6g} windows, "
                f"more than {LONGEST_PERIOD}: give shares that need fewer digits, such as 61.28 and 38.72"
            )
        self._source = np.empty(self.period, np.int32)
        self._number = np.empty(self.period, np.int32)  # index among the source's samples in the period
        taken = [0] * len(self.units)

        def deadline(source: int) -> int:
            return -(-(taken[source] + 1) * self.period // self.units[source])

        for index in range(self.period):
            released = [
                source
                for source, unit in enumerate(self.units)
                if taken[source] < unit and taken[source] * self.period // unit <= index
            ]
            source = min(released, key=deadline)
            self._source[index], self._number[index] = source, taken[source]
            taken[source] += 1

    def source(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and the number of earlier samples of this source."""
        periods, offset = divmod(index, self.period)
        source = int(self._source[offset])
        return source, periods * self.units[source] + int(self._number[offset])
