"""Reports of a run to the progress bar and to an experiment tracker."""

import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from crosshead.recipes.train import train
from crosshead.recipes.trainer.callbacks import ReportProgress
from toy_training import KNOCKING, metrics, toy_run


def test_progress_reports_steps_loss_and_speed(monkeypatch):
    clock, reports = [100.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    state = SimpleNamespace(global_step=6, max_steps=20, is_world_process_zero=True)
    reporter = ReportProgress(lambda *progress: reports.append(progress), per_step=1000)
    reporter.on_step_begin(None, state, None)  # the run resumes after step 6
    state.global_step = 7
    reporter.on_step_end(None, state, None)
    state.global_step, clock[0] = 10, 102.0
    reporter.on_log(None, state, None, {"loss": 3.14159, "grad_norm": 1.0})
    clock[0] = 150.0  # an evaluation does not count
    reporter.on_log(None, state, None, {"eval_loss": 3.5})
    reporter.on_log(None, state, None, {"train_runtime": 2.0})
    assert reports == [
        ("training", 7, 20, ""),
        ("training", 10, 20, "loss 3.1416, 2,000 tokens/s"),
        ("training", 10, 20, "held-out loss 3.5000, 2,000 tokens/s"),
    ]
    state.global_step, clock[0] = 16, 153.0
    reporter.on_log(None, state, None, {"loss": 3.0})
    assert reports.pop() == ("training", 16, 20, "loss 3.0000, 2,000 tokens/s")
    state.is_world_process_zero = False
    reporter.on_step_end(None, state, None)
    assert len(reports) == 3


@pytest.fixture
def trackio(monkeypatch):
    """A fake `trackio` module that records its calls."""
    module = ModuleType("trackio")
    module.__spec__ = ModuleSpec("trackio", None)
    module.began, module.logged, module.ended = [], [], []
    module.config = {}
    module.context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))
    module.init = lambda **options: module.began.append(options)
    module.log = module.logged.append
    module.finish = lambda: module.ended.append(True)
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_run_reports_to_named_tracker(trackio, tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, 4, watch={"every": 2, "report_to": ("trackio",)})
    train(recipe)
    assert len(trackio.began) == len(trackio.ended) == 1
    expected = [line for line in metrics(recipe) if "loss" in line]
    records = [line for line in trackio.logged if "train/loss" in line]
    assert [line["train/global_step"] for line in records] == [line["step"] for line in expected] == [2, 4]
    for line, written in zip(records, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "spikes", "drift/knocking"):
            assert line[f"train/{name}"] == written[name], name
    assert any("eval/loss" in line for line in trackio.logged)


def test_run_does_not_report_to_unnamed_tracker(trackio, tmp_path):
    train(toy_run(KNOCKING, tmp_path, 2))
    assert trackio.began == trackio.logged == []
