"""The sampling order of a run against its definition: permutations, shares, and random access."""

import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise, permutations

import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.sampling_order import SourceOrder, shuffled
from crosshead.recipes.data.training_data import RunSamples

TABLE_D = [4.24, 3.50, 4.37, 3.19, 10.94, 61.28, 12.48]
"""Sampling ratios from table D of the Mixture-of-Head paper."""
WEIGHTS = {
    "one": [0.3],
    "equal": [1.0, 1.0, 1.0],
    "table D": TABLE_D,
    "a thousand to one": [1, 1000],
    "hundred sources": list(range(1, 101)),
    **{f"random {seed}": [random.Random(seed).randint(1, 40) for _ in range(seed + 2)] for seed in range(20)},
}


PINNED_SHUFFLE = [7, 4, 0, 2, 5, 3, 1, 8, 6, 9]
PINNED_LARGE = {
    200: [49, 43, 162],
    1000: [313, 713, 402],
    1000000: [507110, 377203, 956544],
    1000000000000: [967400298082, 570277219221, 292427535511],
}
PINNED_RUN = [(0, 2), (0, 3), (1, 1), (0, 1), (0, 0), (1, 2), (0, 4), (0, 4), (0, 0), (1, 0), (0, 2), (0, 3)]


def order_of(sizes, weights, seed):
    """Return the order of a long run: pairs of a source and a window."""
    sources = [[(source, window) for window in range(size)] for source, size in enumerate(sizes)]
    return RunSamples(sources, weights, seed, 10**16)


@pytest.mark.parametrize("count", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_shuffle_is_a_permutation(count):
    for key in ("0 0 0", "0 0 1", "7 3 2"):
        assert sorted(shuffled(key, count, index) for index in range(count)) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_shuffle_orders_are_equally_likely(count):
    orders = list(permutations(range(count)))
    counts = Counter(
        tuple(shuffled(f"{key}", count, index) for index in range(count)) for key in range(100 * len(orders))
    )
    spread = sum((counts[order] - 100) ** 2 / 100 for order in orders) / (len(orders) - 1)
    assert set(counts) == set(orders)
    assert spread < 3  # 1 is expected by chance


def test_shuffled_order_is_uncorrelated_with_original():
    count = 1000
    order = [shuffled("1 2 3", count, index) for index in range(count)]
    steps = Counter(after - before for before, after in pairwise(order))
    mean = sum(index * value for index, value in enumerate(order)) / count
    assert max(steps.values()) < 8
    assert abs(mean - ((count - 1) / 2) ** 2) < 3 * count**1.5 / 12  # three deviations of an uncorrelated order


def test_sampling_order_equals_pinned_values():
    """The order may never change, since a run may be resumed with another version of crosshead."""
    assert [shuffled("0 0 0", 10, index) for index in range(10)] == PINNED_SHUFFLE
    assert {count: [shuffled("0 0 0", count, index) for index in range(3)] for count in PINNED_LARGE} == PINNED_LARGE
    assert [order_of([5, 3], [0.7, 0.3], seed=1)[index] for index in range(12)] == PINNED_RUN


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_source_counts_stay_within_one_of_their_share(weights):
    turns = SourceOrder(weights)
    parts = [int(Fraction(str(weight)) * 100) for weight in weights]
    counts = [0] * len(weights)
    for index in range(2 * turns.period + 3):
        source, number = turns.source(index)
        assert number == counts[source]
        counts[source] += 1
        for count, part in zip(counts, parts, strict=True):
            assert abs(count * sum(parts) - part * (index + 1)) < sum(parts)


def test_source_order_depends_only_on_weight_ratio():
    expected = [SourceOrder([2, 1, 1]).source(index) for index in range(50)]
    assert [SourceOrder([0.5, 0.25, 0.25]).source(index) for index in range(50)] == expected
    assert SourceOrder([2, 1, 1]).period == 4
    assert SourceOrder(TABLE_D).period == 9999 + 1


def test_weights_without_common_period_are_refused():
    with pytest.raises(RecipeError, match=r"0\.123456789") as caught:
        SourceOrder([0.123456789, 1])
    assert "\n" not in str(caught.value)


def test_each_source_shuffles_its_own_windows_every_epoch():
    order = order_of([7, 4, 7], [3, 1, 3], seed=5)
    drawn = {source: [] for source in range(3)}
    for index in range(7 * 14):
        source, window = order[index]
        drawn[source].append(window)
    assert [len(windows) for windows in drawn.values()] == [42, 14, 42]
    for count, windows in zip((7, 4, 7), drawn.values(), strict=True):
        epochs = [windows[start : start + count] for start in range(0, len(windows) - count + 1, count)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert drawn[0] != drawn[2]


def test_sample_order_supports_random_access():
    sizes, weights = [1000, 33], [0.6, 0.4]
    whole = [order_of(sizes, weights, seed=2)[index] for index in range(3000)]
    for index in random.Random(0).sample(range(3000), 200):
        assert order_of(sizes, weights, seed=2)[index] == whole[index]
    far = order_of(sizes, weights, seed=2)[10**15]
    assert far[1] < sizes[far[0]]


def test_different_seeds_give_different_orders():
    runs = [[order_of([50], [1], seed)[index] for index in range(50)] for seed in (0, 1, 2**40)]
    assert runs[0] != runs[1] != runs[2] != runs[0]
