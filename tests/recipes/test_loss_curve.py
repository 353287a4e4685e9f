"""Fits of scaling laws recover the parameters of a loss curve, with and without noise and spikes."""

import numpy as np
import pytest

from crosshead.recipes.sweep.loss_curve import ScalingLaw, fit_scaling_law
from tiers import grid

LAWS = [(1e8, 0.3, 2.0), (5e12, 0.1, 1.5), (1e9, 0.6, 3.0), (3e9, 0.5, 0.0)]
"""(Dc, a, L0) of `loss = (Dc / tokens)**a + L0`."""


def curve(law, points=250, noise=0.0, seed=0):
    tokens = np.linspace(2e7, 5e10, points)
    dc, exponent, floor = law
    losses = (dc / tokens) ** exponent + floor
    return tokens, losses + noise * np.random.default_rng(seed).standard_normal(points)


def true_loss(law, tokens):
    return (law[0] / tokens) ** law[1] + law[2]


@pytest.mark.parametrize("law", LAWS)
def test_fit_recovers_parameters_without_noise(law):
    fit = fit_scaling_law(*curve(law))
    assert fit.exponent == pytest.approx(law[1], rel=1e-3)
    assert fit.tokens == pytest.approx(law[0], rel=1e-2)
    assert fit.floor == pytest.approx(law[2], abs=1e-3)
    assert fit.error < 1e-6


@pytest.mark.parametrize(("law", "seed"), grid(LAWS, range(3), strength=1))
def test_fit_is_close_with_noise(law, seed):
    fit = fit_scaling_law(*curve(law, noise=0.01, seed=seed))
    assert fit.exponent == pytest.approx(law[1], rel=0.1)
    assert fit.loss(5e10) == pytest.approx(true_loss(law, 5e10), abs=4 * fit.error)
    assert fit.loss(5e11) == pytest.approx(true_loss(law, 5e11), abs=0.02)
    assert 0.0005 < fit.error < 0.002


@pytest.mark.parametrize(("law", "curve"), grid(LAWS[:3], [(2e7, 250), (2e10, 30)], strength=1))
def test_fit_error_is_deviation_at_last_point(law, curve):
    """The last point has the largest error, since the other points lie on one side of it."""
    first, points = curve
    tokens = np.linspace(first, 5e10, points)
    exact = (law[0] / tokens) ** law[1] + law[2]
    fits = [
        fit_scaling_law(tokens, exact + 0.01 * np.random.default_rng(seed).standard_normal(points))
        for seed in range(60)
    ]
    deviation = np.std([fit.loss(5e10) for fit in fits])
    assert np.median([fit.error for fit in fits]) == pytest.approx(deviation, rel=0.4)


@pytest.mark.parametrize("law", LAWS)
def test_fit_ignores_loss_spikes(law):
    tokens, losses = curve(law, noise=0.005)
    losses[np.random.default_rng(1).choice(len(losses), 12, replace=False)] += 3.0
    fit = fit_scaling_law(tokens, losses)
    assert fit.loss(5e10) == pytest.approx(true_loss(law, 5e10), abs=0.005)
    assert fit.exponent == pytest.approx(law[1], rel=0.1)


def test_fit_is_invariant_to_token_scale():
    tokens, losses = curve(LAWS[0], noise=0.01)
    first, second = fit_scaling_law(tokens, losses), fit_scaling_law(tokens * 1e-6, losses)
    assert second.exponent == pytest.approx(first.exponent, rel=1e-6)
    assert second.tokens == pytest.approx(first.tokens * 1e-6, rel=1e-6)


@pytest.mark.parametrize("losses", [[1.0] * 9, list(range(1, 10)), [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 9.0]])
def test_fit_of_non_decreasing_losses_is_flat(losses):
    fit = fit_scaling_law(range(1, 10), losses)
    rounding = 1e-12  # the rounding of least squares differs between processors
    assert fit.loss(1) == fit.loss(100) and min(losses) - rounding <= fit.floor <= max(losses) + rounding


def test_fitted_parameters_are_not_negative():
    fit = fit_scaling_law(range(1, 10), [9 - loss for loss in range(9)])
    assert fit.floor >= 0 and fit.tokens > 0 and fit.exponent > 0


def test_scaling_law_loss_equals_paper_equation():
    assert ScalingLaw(tokens=64.0, exponent=0.5, floor=1.5, error=0.0).loss(16.0) == 3.5


@pytest.mark.parametrize(
    ("tokens", "losses", "message"),
    [
        ([1, 2, 3, 4], [4, 3, 2, 1], "^4 "),
        ([1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], "^1 "),
        ([1, 2, 3, 4, 5], [4, 3, 2, 1], "^5 "),
        ([0, 1, 2, 3, 4], [5, 4, 3, 2, 1], " 0 "),
        ([1, 2, 3, 4, 5], [5, 4, float("nan"), 2, 1], "finite"),
    ],
)
def test_invalid_curve_points_are_refused(tokens, losses, message):
    with pytest.raises(ValueError, match=message):
        fit_scaling_law(tokens, losses)
