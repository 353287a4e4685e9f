"""Which runs of a sweep count as stable, from invented losses."""

from dataclasses import replace

import numpy as np
import pytest

from crosshead.recipes.sweep import sweep as module
from crosshead.recipes.sweep.loss_curve import TRAINING, count_spikes, divergence, final_rise
from crosshead.recipes.sweep.sweep import sweep_runs
from crosshead_command.sweep import _lines
from toy_sweeps import STEPS, losses_of, sweep_recipe, write_metrics


@pytest.fixture
def recipe(tmp_path):
    return sweep_recipe(tmp_path)


def test_spike_is_stable_but_lasting_rise_is_not(recipe):
    run = sweep_runs(recipe)[0]
    losses = losses_of(1e-3)
    passed = [*losses[:100], 8.0, 7.0, 6.0, *losses[103:]]
    risen = losses[:150] + [loss + 1.0 for loss in losses[150:]]
    for values, rises, spiked in ((losses, False, False), (passed, False, True), (risen, True, True)):
        write_metrics(run, values)
        assert (final_rise(run) > 0.5) == rises and (final_rise(run) == 0) == (not rises)
        assert (count_spikes(run) > 0) == spiked and divergence(run) == ""
        assert module.judge(run, TRAINING, None).stable == (not rises)


def test_short_run_that_recovered_from_a_blow_up_is_not_stable(recipe):
    """These are losses of a run with a learning rate of 1; a power law fitted to them ends far below all of them."""
    run = replace(sweep_runs(recipe)[0], train=replace(recipe.train, tokens=40 * 1024, warmup=4))
    blow_up = [6.23, 7.55, 13.9, 18.8, 20.0, 20.2, 20.6, 20.4, 20.1, 19.6, 19.0, 18.3, 17.3, 14.5, 11.8, 9.1, 7.4]
    losses = [*blow_up, *np.linspace(6.4, 5.27, 40 - len(blow_up)).tolist()]
    write_metrics(run, losses)
    attempt = module.judge(run, TRAINING, None)
    assert not attempt.stable and attempt.error.startswith("the loss diverged: 20.20 at step 6, and 6.23 before")
    assert attempt.curve.last_loss == pytest.approx(np.mean(losses[-7:]))
    report = module._report(recipe, TRAINING, [attempt])
    line = [*_lines(report)][1]
    assert f"  {attempt.curve.last_loss:.4f}  " in line and line.endswith("  the loss diverged")
    write_metrics(run, [6.23, 13.9, 18.8, *np.linspace(6.2, 5.1, 37).tolist()])  # a spike of two steps
    assert module.judge(run, TRAINING, None).stable


@pytest.mark.parametrize("steps", (STEPS, 6))
def test_loss_that_ends_above_first_loss_is_a_rise(recipe, steps):
    """Even if it falls from a peak in the first steps, or has too few steps for windows."""
    chance = np.random.default_rng(0)
    run = replace(sweep_runs(recipe)[0], train=replace(recipe.train, tokens=steps * 1024, warmup=1 / steps))
    write_metrics(run, [5.55, *(10 + 15 / step + 2 * chance.standard_normal() for step in range(1, steps))])
    assert final_rise(run) > 1
    assert not module.judge(run, TRAINING, None).stable


def test_noisy_flat_loss_is_no_rise(recipe):
    run = sweep_runs(recipe)[0]
    for seed in range(20):
        write_metrics(run, (3 + 0.4 * np.random.default_rng(seed).standard_normal(STEPS)).tolist())
        assert final_rise(run) == 0
