"""Paired differences of two models on the same items, and the coverage of their intervals."""

import math

import pytest
import torch

from crosshead.evals.harness.scores import Items, difference, interval, ratio, ratio_error, t_quantile
from tiers import grid

SAMPLES = 2000
TOLERANCE = 3 * math.sqrt(0.95 * 0.05 / SAMPLES)
"""Three standard errors of a coverage of 0.95 that was estimated from SAMPLES samples."""


def coverage(draw, true, binary=False):
    """Return the share of intervals that contain the true ratio; `draw` returns values and weights of one sample."""
    generator, held = torch.Generator().manual_seed(0), 0
    for _ in range(SAMPLES):
        values, weights = draw(generator)
        low, high = interval(values.tolist(), weights.tolist(), binary)
        held += low <= true <= high
    return held / SAMPLES


@pytest.mark.parametrize("count", [10, 45, 300])
def test_interval_coverage_for_mean(count):
    def draw(generator):
        return 0.3 + torch.randn(count, generator=generator, dtype=torch.float64), torch.ones(count)

    assert coverage(draw, 0.3) == pytest.approx(0.95, abs=TOLERANCE)


@pytest.mark.parametrize("count", [45, 300])
def test_interval_coverage_for_perplexity_change(count):
    """Documents differ in length, and longer ones change more in total."""

    def draw(generator):
        weights = torch.randint(50, 300, (count,), generator=generator).double()
        noise = torch.randn(count, generator=generator, dtype=torch.float64)
        return weights * (0.02 + 0.05 * noise), weights

    assert coverage(draw, 0.02) == pytest.approx(0.95, abs=TOLERANCE + 0.01)


@pytest.mark.parametrize(
    ("count", "rates"),
    grid([60, 240, 1000], [(0.3, 0.2), (0.1, 0.1), (0.05, 0.01), (0.02, 0.02), (0.003, 0.0)], strength=1),
)
def test_interval_coverage_for_accuracy_change(count, rates):
    """Coverage is never clearly below 95 %, but may be above it where hardly any item differs."""
    lost, won = rates

    def draw(generator):
        chance = torch.rand(count, generator=generator)
        return (chance > 1 - won).double() - (chance < lost).double(), torch.ones(count)

    held = coverage(draw, won - lost, binary=True)
    assert held > 0.95 - TOLERANCE - 0.005
    if count * (lost + won) > 40:
        assert held < 0.95 + TOLERANCE + 0.005


def test_two_added_items_restore_coverage_for_rare_differences():
    def draw(generator):
        return -(torch.rand(240, generator=generator) < 0.003).double(), torch.ones(240)

    assert coverage(draw, -0.003, binary=False) < 0.6
    assert coverage(draw, -0.003, binary=True) > 0.95


def test_paired_interval_is_narrower_than_standard_error():
    hard = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    first = Items(hard.tolist(), [1.0] * 200, False)
    second = Items((hard + 0.1 + 0.1 * noise).tolist(), [1.0] * 200, False)
    change = difference(first, second, True)
    assert change["verdict"] == "better"
    assert change["interval"][1] - change["interval"][0] < first.standard_error() / 2


@pytest.mark.parametrize("exponential", [True, False])
def test_difference_of_equal_items_is_zero(exponential):
    items = Items([3.0, 5.0, 2.0, 9.0], [1.0, 2.0, 1.0, 3.0], exponential)
    change = difference(items, items, True)
    assert (change["change"], change["interval"], change["items_that_differ"]) == (0, [0, 0], 0)
    assert change["verdict"] == "equal"


def test_difference_of_binary_answers():
    first, second = (
        Items([1.0, 1.0, 1.0, 0.0] * 50, [1.0] * 200, False),
        Items([1.0, 1.0, 0.0, 0.0] * 50, [1.0] * 200, False),
    )
    change = difference(first, second, True)
    assert (change["change"], change["items_that_differ"], change["verdict"]) == (-0.25, 50, "worse")
    share, count = -50 / 202, 202
    error = math.sqrt((52 / count - share**2) / (count - 1))
    reach = t_quantile(count) * error
    assert change["interval"] == pytest.approx([share - reach, share + reach])
    assert difference(second, first, True)["verdict"] == "better"
    same = difference(first, first, True)
    assert (same["change"], same["verdict"]) == (0, "equal")
    assert same["interval"][0] == -same["interval"][1] < 0


def test_perplexity_change_is_relative_to_the_first_model():
    first = Items([10.0, 20.0, 30.5], [5.0, 10.0, 15.0], True)
    second = Items([11.0, 22.0, 33.0], [5.0, 10.0, 15.0], True)
    change = difference(first, second, False)
    assert change["change"] == pytest.approx(math.exp(66 / 30) / math.exp(60.5 / 30) - 1)
    assert change["verdict"] == "worse"
    assert difference(second, first, False)["verdict"] == "better"
    assert change["scale"] == "part of the first"


def test_ratio_error_with_unit_weights_is_standard_error():
    values = torch.randn(37, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    error = ratio_error(values.tolist(), [1.0] * 37)
    assert error == pytest.approx(float(values.std() / math.sqrt(37)))
    assert ratio(values.tolist(), [1.0] * 37) == pytest.approx(float(values.mean()))
    assert math.isnan(ratio_error([1.0], [1.0]))


@pytest.mark.parametrize(
    ("count", "expected"), [(8, 2.3646), (10, 2.2622), (30, 2.0452), (240, 1.9699), (10**6, 1.96)]
)
def test_t_quantiles_match_tables(count, expected):
    assert t_quantile(count) == pytest.approx(expected, abs=2e-3)
