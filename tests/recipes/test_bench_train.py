"""`crosshead bench train`: both sides train the same model on the same batches with the same settings, in turn.

Slow tier, like all tests of measuring tools, except for one quick run of the command and the instant tests.
"""

import json
import os
import signal

import pytest
import torch
from transformers import Trainer

from broken import run
from crosshead.evals.bench import machine as kept_memory
from crosshead.recipes import bench_train as module
from crosshead.recipes.bench_train import CASES, bench_train, bench_train_lines
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.train import Outcome
from crosshead.recipes.trainer.run_trainer import RunTrainer

SMALL = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def small_settings(monkeypatch):
    monkeypatch.setattr(module, "SHAPE", module.SHAPE | SMALL)
    monkeypatch.setattr(module, "LENGTH", 32)
    monkeypatch.setattr(module, "WARM_UPS", 1)
    monkeypatch.setattr(kept_memory, "MALLOC_SETTINGS", {})  # other tests of this process measure memory


@pytest.fixture
def recorded_training(monkeypatch):
    """Lists of the trainers, in the order of their start, and of (trainer, inputs) of each micro batch."""
    runs, batches = [], []
    train, step = Trainer.train, Trainer.training_step

    def training(self, *args, **kwargs):
        runs.append(self)
        return train(self, *args, **kwargs)

    def stepping(self, model, inputs, *args, **kwargs):
        batches.append((self, {name: value.clone() for name, value in inputs.items()}))
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", training)
    monkeypatch.setattr(Trainer, "training_step", stepping)
    return runs, batches


@pytest.mark.slow
def test_stock_and_own_trainer_alternate_on_same_batches(recorded_training):
    report = bench_train(["explicit", "mixture"], rounds=2, steps=1)
    runs, batches = recorded_training
    kinds = [isinstance(trainer, RunTrainer) for trainer in runs]
    assert kinds == [False, True, True, False] * 2
    assert [bool(getattr(trainer.model.config, "mixers", None)) for trainer in runs] == kinds
    stock, ours = runs[:2]
    for name, value in module.SHAPE.items():
        assert getattr(stock.model.config, name) == getattr(ours.model.config, name) == value
    same = set(vars(stock.args)) - {"output_dir", "logging_dir", "accelerator_config", "distributed_state"}
    assert {name: getattr(stock.args, name) for name in same} == {name: getattr(ours.args, name) for name in same}
    assert [trainer for trainer, _ in batches] == [trainer for trainer in runs for _ in range(2 * 3)]
    theirs, mine = ([inputs for trainer, inputs in batches if trainer is side] for side in (stock, ours))
    # Two micro batches in each step: a warm-up, a measured step, and the last step.
    assert [sorted(each) for each in theirs] == [sorted(each) for each in mine] == 6 * [["input_ids", "labels"]]
    rows = [{tuple(sample["input_ids"].tolist()) for sample in side.train_dataset} for side in (stock, ours)]
    assert rows[0] == rows[1] and len(rows[0]) == 3 * 4  # each side shuffles them on its own
    for side in (theirs, mine):
        assert {tuple(row.tolist()) for batch in side for row in batch["input_ids"]} == rows[0]
    assert {part.dtype for part in stock.model.parameters()} == {torch.float32}
    figures = report["tokens_per_second"]
    assert list(figures) == ["explicit", "mixture"] and figures["mixture"]["mixers"] == CASES["mixture"]
    for case in figures.values():
        assert [len(case[key]) for key in ("ours", "stock", "ratios")] == [2, 2, 2]
        assert case["ratios"][1] == case["ours"][1] / case["stock"][1]
        assert min(case["ratios"]) <= case["median_ratio"] <= max(case["ratios"])
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["threads"] == torch.get_num_threads()
    assert [line.split()[0] for line in bench_train_lines(report)] == ["tokens", "explicit", "mixture"]


def test_speed_excludes_startup_warm_ups_logging_and_last_step(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    def run(progress):
        progress("tokenising", 1, None)
        for step, seconds in enumerate((1000, 1, 2, 30, 500), 1):
            clock[0] += seconds
            progress("training", step, 5)
            if step in (2, 4):  # a logged step is reported twice
                clock[0] += 0.5
                progress("training", step, 5, "loss 1.0000")

    assert module._speed(run, steps=2) == 2 * 4 * 32 / 3.5  # the step after a logged step includes the logging
    assert module._speed(run, steps=3) == 3 * 4 * 32 / 33.5


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_signal_to_training_stops_benchmark(handler, monkeypatch):
    """`train` returns early after a signal; then the benchmark stops, too, even if the signal is ignored."""
    before = signal.signal(signal.SIGINT, handler)
    stopped = Outcome(1, 8, signal.SIGINT, None, {})
    monkeypatch.setattr(module, "train", lambda recipe, progress: stopped)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench_train(["explicit"], rounds=1, steps=1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_knocking_cases_match_shipped_recipes():
    for name in ("papers/kha_dense_0.61b", "small/smollm2_knocking", "small/qwen3_0.6b_knocking"):
        ours = load_recipe(name).model.config["mixers"]["knocking"]
        assert CASES[f"knocking-{ours['form']}"]["knocking"].get("on", ["value"]) == ours.get("on", ["value"]), name


def test_bench_train_command_report_and_errors(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    command = f"bench train knocking-mlp --rounds 1 --steps 2 --out {tmp_path}/a.json"
    status, out, err = run(capfd, monkeypatch, command)
    assert status == 0 and out.splitlines()[1].startswith("knocking-mlp ")
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["settings"]["rounds"], report["settings"]["steps"]) == (1, 2)
    assert report["shape"]["hidden_size"] == SMALL["hidden_size"]
    assert report["device"] == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == ""  # the trainers would take a GPU
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    again = command
    for command, status, words in (
        ("bench train explict", 1, "'explicit'"),
        (again, 1, f"{tmp_path}/a.json exists: choose another name, or add --overwrite"),
        (f"bench train explicit --out {tmp_path}/b/a.json", 1, f"{tmp_path}/b/a.json"),
        ("bench train --steps 0", 2, "--steps"),
        ("bench train --device tpu", 2, "'tpu'"),
        ("bench train --device cuda", 1, "--device cuda"),
        ("bench tran", 2, "'train'"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        exit_status, out, err = run(capfd, monkeypatch, command)
        assert (exit_status, out) == (status, "") and words in err and "Traceback" not in err
