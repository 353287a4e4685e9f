"""`crosshead sweep`: stable rates, the chosen rate, the report and the plot, and resumed sweeps."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from broken import run
from crosshead.common.errors import DivergedError, RecipeError
from crosshead.recipes.sweep import sweep as module
from crosshead.recipes.sweep.loss_curve import (
    HELD_OUT,
    TRAINING,
    LossCurve,
    ScalingLaw,
    loss_curve,
    loss_kind,
)
from crosshead.recipes.sweep.sweep import PICTURE, REPORT, Attempt, choose, sweep, sweep_runs
from crosshead.recipes.train import Outcome
from crosshead_command.sweep import _lines as lines_of
from toy_sweeps import NAME, STEPS, WARMUP, losses_of, sweep_recipe, write_metrics

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def recipe(tmp_path):
    return sweep_recipe(tmp_path)


class FakeTrainer:
    """A fake `train` that writes the losses of a curve; runs may diverge or be stopped."""

    def __init__(self, diverges=(), stopped=()):
        self.diverges, self.stopped, self.rates = diverges, set(stopped), []

    def __call__(self, run, progress):
        rate = run.train.learning_rate
        self.rates.append(rate)
        progress("training", STEPS, STEPS, "loss 2.0")
        if rate in self.stopped:
            self.stopped.discard(rate)
            return Outcome(50, STEPS, 15, None, {})
        if rate in self.diverges:
            write_metrics(run, losses_of(rate)[:80])
            raise DivergedError("the loss is nan at step 81: start again with a lower train.learning_rate")
        write_metrics(run, losses_of(rate))
        return Outcome(STEPS, STEPS, None, Path(run.output) / "model", {})


@pytest.fixture
def fake_trainer(monkeypatch):
    def made(**options):
        stand_in = FakeTrainer(**options)
        monkeypatch.setattr(module, "train", stand_in)
        return stand_in

    return made


def test_sweep_chooses_largest_stable_rate(recipe, fake_trainer):
    stand_in = fake_trainer(diverges=[3e-3])
    reports = []
    report = sweep(recipe, lambda *progress: reports.append(progress))
    assert stand_in.rates == [1e-4, 1e-3, 3e-3]
    assert {stage for stage, *_ in reports} == {"0.0001 training", "0.001 training", "0.003 training"}
    assert report["chosen"] == 1e-3 and report["loss"] == HELD_OUT and report["stopped_by"] is None
    small, large, diverged = report["runs"]
    assert small["stable"] and large["stable"] and not diverged["stable"]
    assert small["fitted_loss"] > large["fitted_loss"] and diverged["fitted_loss"] is None
    assert large["law"]["exponent"] == pytest.approx(0.4, abs=0.05)
    assert large["law"]["tokens"] == pytest.approx(20 * 1024, rel=0.2)
    assert "nan" in diverged["error"] and "step 81" in diverged["error"]
    assert len(diverged["curve"]["tokens"]) == 7  # evaluated after steps 20, 30, ... 80
    assert json.loads((Path(recipe.output) / REPORT).read_text()) == json.loads(json.dumps(report))


def test_sweep_runs_differ_only_in_rate_and_output(recipe):
    first, second, third = sweep_runs(recipe)
    assert [each.train.learning_rate for each in (first, second, third)] == [1e-4, 1e-3, 3e-3]
    assert Path(second.output) == Path(recipe.output) / "rate_0.001"
    same = replace(second, output=first.output, train=replace(second.train, learning_rate=1e-4))
    assert same == first and first.sweep is None


def test_stopped_sweep_resumes_without_diverged_runs(recipe, fake_trainer):
    fake_trainer(diverges=[1e-3], stopped=[3e-3])
    assert sweep(recipe)["stopped_by"] == 15
    again = fake_trainer(diverges=[1e-3])
    report = sweep(recipe)
    assert again.rates == [1e-4, 3e-3]  # a finished run ends at once; one that diverged is not tried again
    assert report["chosen"] == 3e-3 and not report["runs"][1]["stable"]


def test_changed_recipe_repeats_diverged_runs(recipe, fake_trainer):
    fake_trainer(diverges=[1e-3])
    sweep(recipe)
    again = fake_trainer()
    report = sweep(replace(recipe, train=replace(recipe.train, gradient_clipping=0.1)))
    assert 1e-3 in again.rates and report["runs"][1]["stable"]


@pytest.mark.parametrize("kept", [20, None])
def test_damaged_record_of_diverged_run_is_ignored(kept, recipe, fake_trainer):
    """`kept` is the number of bytes of the truncated record; None replaces it by a list."""
    fake_trainer(diverges=[1e-3])
    sweep(recipe)
    marker = Path(recipe.output) / "rate_0.001" / module.DIVERGED
    marker.write_bytes(b"[]" if kept is None else marker.read_bytes()[:kept])
    again = fake_trainer()
    report = sweep(recipe)
    assert 1e-3 in again.rates and report["runs"][1]["stable"]


def test_errors_other_than_divergence_are_raised(recipe, monkeypatch):
    def full(run, progress):
        raise RecipeError("lower train.learning_rate, or the checkpoint could not be written")

    monkeypatch.setattr(module, "train", full)
    with pytest.raises(RecipeError, match=r"train\.learning_rate"):
        sweep(recipe)


def test_sweep_without_stable_rate_chooses_none(recipe, fake_trainer):
    fake_trainer(diverges=[1e-4, 1e-3, 3e-3])
    report = sweep(recipe)
    assert report["chosen"] is None
    assert len(list(ElementTree.parse(Path(recipe.output) / PICTURE).iter(f"{SVG}text"))) > 3


def test_sweep_without_rates_is_refused(recipe):
    with pytest.raises(RecipeError, match="sweep"):
        sweep(replace(recipe, sweep=None))


def test_sweep_command_without_rates_writes_no_toy(tmp_path, monkeypatch, capfd):
    status, _, err = run(capfd, monkeypatch, f"sweep small/smollm2_knocking --toy {tmp_path / 'toy'}")
    assert status == 1 and "`sweep`" in err
    assert not (tmp_path / "toy").exists()


def attempt(rate, fitted, error=0.001, stable=True):
    """Return a finished attempt with this fitted loss."""
    law = ScalingLaw(tokens=0.0, exponent=1.0, floor=fitted, error=error)
    return Attempt(rate, "", "" if stable else "rose", 0, LossCurve((1,), (fitted,)), law)


@pytest.mark.parametrize(
    ("tries", "chosen", "better"),
    [
        ([attempt(1, 3.0), attempt(2, 2.9), attempt(3, 2.8)], 3, None),
        ([attempt(1, 3.0), attempt(2, 2.9), attempt(3, 2.8, stable=False)], 2, None),
        ([attempt(1, 3.0), attempt(2, 2.8), attempt(3, 2.9)], 3, 2),  # stable, and yet worse
        ([attempt(1, 3.0), attempt(2, 2.8), attempt(3, 2.802)], 3, None),  # worse by chance
        ([attempt(1, 3.0), attempt(2, 2.8), attempt(3, 2.9, error=0.1)], 3, None),
        ([attempt(1, 2.0, stable=False), attempt(2, 2.8), attempt(3, 2.9)], 3, 2),
        ([attempt(1, 3.0, stable=False)], None, None),
    ],
)
def test_choose_largest_stable_and_better_rate(tries, chosen, better):
    result = choose(tries)
    assert [each.learning_rate if each else None for each in result] == [chosen, better]


def test_report_names_smaller_rate_with_lower_loss(recipe, monkeypatch):
    def stand_in(run, progress):
        rate = run.train.learning_rate
        write_metrics(run, losses_of(1e-3 if rate == 3e-3 else 3e-3 if rate == 1e-3 else rate))
        return Outcome(STEPS, STEPS, None, Path(run.output) / "model", {})

    monkeypatch.setattr(module, "train", stand_in)
    report = sweep(recipe)
    assert report["chosen"] == 3e-3 and report["lower"] == 1e-3
    lines = {float(words[0]): line for line in [*lines_of(report)][1:] for words in [line.split()]}
    assert lines[3e-3].endswith("  chosen")
    assert lines[1e-3].endswith("  stable, fitted lower than the chosen one")
    texts = ElementTree.parse(Path(recipe.output) / PICTURE).iter(f"{SVG}text")
    assert {"chosen", "stable"} <= {text.text for text in texts}


def test_sweep_with_too_few_steps_starts_no_run(recipe, fake_trainer):
    stand_in = fake_trainer()
    with pytest.raises(RecipeError, match=r"\b1\b.*\b11\b"):
        sweep(replace(recipe, train=replace(recipe.train, tokens=(WARMUP + 1) * 1024)))
    assert stand_in.rates == []


def test_loss_curve_starts_after_warmup(recipe):
    run = sweep_runs(recipe)[0]
    write_metrics(run, losses_of(1e-3))
    assert loss_curve(run, TRAINING).tokens == tuple(1024 * step for step in range(WARMUP + 1, STEPS + 1))
    held_out = loss_curve(run, HELD_OUT)
    assert held_out.tokens[0] == 1024 * 20 and held_out.losses[0] == losses_of(1e-3)[19] + 0.5


def test_loss_kind_is_held_out_only_with_enough_evaluations(recipe):
    assert loss_kind(recipe) == HELD_OUT
    assert loss_kind(replace(recipe, watch=replace(recipe.watch, evaluate_every=50))) == TRAINING
    assert loss_kind(replace(recipe, watch=replace(recipe.watch, evaluate_every=None))) == TRAINING


def test_sweep_with_too_few_losses_is_refused(recipe, fake_trainer):
    fake_trainer()
    with pytest.raises(RecipeError, match="tokens"):
        sweep(
            replace(recipe, train=replace(recipe.train, warmup=197), watch=replace(recipe.watch, evaluate_every=None))
        )


def test_sweep_plot_shows_rates_and_curves(recipe, fake_trainer):
    fake_trainer(diverges=[3e-3])
    sweep(recipe)
    picture = ElementTree.parse(Path(recipe.output) / PICTURE)
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"0.0001", "0.001", "0.003", "chosen", "stable", "held-out loss", "tokens"} <= set(texts)
    groups = {each.get("id"): each for each in picture.iter(f"{SVG}g")}
    paths = {rate: groups[rate].find(f"{SVG}path") for rate in ("0.0001", "0.001", "0.003")}
    assert paths["0.003"] is None
    heights = list(map(float, paths["0.0001"].get("d").split()[2::3]))
    assert heights == sorted(heights) and heights[0] < heights[-1]


@pytest.mark.slow
def test_sweep_command_prints_report_and_writes_files(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = f"sweep {NAME} --toy toy --set sweep.learning_rates=[3e-3,1e2]"
    status, out, err = run(capfd, monkeypatch, command)
    assert status == 0 and "Traceback" not in err
    assert out.endswith(f"wrote {Path('toy/run', PICTURE)}\n")
    rows = [row.split() for row in out.splitlines()]
    assert rows[1][0] == "0.003" and rows[1][-1] == "chosen"
    assert rows[2][0] == "100" and "nan" in rows[2]
    assert (tmp_path / "toy/run/rate_0.003/model/config.json").exists()
    status, out, err = run(capfd, monkeypatch, f"{command} --json")
    assert status == 0 and json.loads(out) == json.loads((tmp_path / "toy/run" / REPORT).read_text())
    status, out, err = run(capfd, monkeypatch, f"sweep {NAME} --toy toy2 --set sweep.learning_rates=[1e2,1e3]")
    assert status == 1 and "learning rate" in err.splitlines()[-1]
