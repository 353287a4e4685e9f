"""`crosshead bench train`: both sides train the same model on the same batches with the same settings, in turn.

Slow tier, like all tests of measuring tools, except for one quick run of the command and the instant tests.
"""

import json
import os
from functools import partial

import pytest
import torch
from transformers import Trainer

from broken import run
from crosshead.evals.bench import machine as kept_memory
from crosshead.recipes import bench_train as module
from crosshead.recipes.bench_train import CASES, SteppedRun, bench_train, bench_train_lines
from crosshead.recipes.schema.load import load_recipe
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
    assert kinds == [False, True] * 2
    assert [bool(getattr(trainer.model.config, "mixers", None)) for trainer in runs] == kinds
    stock, ours = runs[:2]
    for name, value in module.SHAPE.items():
        assert getattr(stock.model.config, name) == getattr(ours.model.config, name) == value
    same = set(vars(stock.args)) - {"output_dir", "logging_dir", "accelerator_config", "distributed_state"}
    assert {name: getattr(stock.args, name) for name in same} == {name: getattr(ours.args, name) for name in same}
    turns = [trainer is ours for trainer, _ in batches[: 2 * 3 * 2]]
    # Two micro batches per step.
    assert turns == [False, False, True, True, True, True, False, False, False, False, True, True]
    theirs, mine = ([inputs for trainer, inputs in batches if trainer is side] for side in (stock, ours))
    assert [sorted(each) for each in theirs] == [sorted(each) for each in mine] == 6 * [["input_ids", "labels"]]
    rows = [{tuple(sample["input_ids"].tolist()) for sample in side.train_dataset} for side in (stock, ours)]
    assert rows[0] == rows[1] and len(rows[0]) == (3 + 1) * 4  # each side shuffles them on its own
    for side in (theirs, mine):
        assert {tuple(row.tolist()) for batch in side for row in batch["input_ids"]} < rows[0]
    assert {part.dtype for part in stock.model.parameters()} == {torch.float32}
    figures = report["tokens_per_second"]
    assert list(figures) == ["explicit", "mixture"] and figures["mixture"]["mixers"] == CASES["mixture"]
    for case in figures.values():
        assert [len(case[key]) for key in ("ours", "stock", "ratios")] == [2, 2, 2]
        assert case["ratios"][1] == case["ours"][1] / case["stock"][1]
        assert min(case["ratios"]) <= case["median_ratio"] <= max(case["ratios"])
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["threads"] == torch.get_num_threads()
    assert [line.split()[0] for line in bench_train_lines(report)] == ["tokens", "explicit", "mixture"]


@pytest.mark.slow
def test_interleaved_run_has_same_losses_as_run_alone(monkeypatch, tmp_path):
    """transformers shares some state among all trainers."""
    losses = {}
    leave = RunTrainer.training_step

    def keeping(self, *args, **kwargs):
        loss = leave(self, *args, **kwargs)
        losses.setdefault(self, []).append(loss.item())
        return loss

    monkeypatch.setattr(RunTrainer, "training_step", keeping)
    recipe = module._recipe(tmp_path, steps=8)
    with SteppedRun(partial(module._train_ours, recipe, "explicit")) as alone:
        for _ in range(7):
            alone.step()
    bench_train(["explicit"], rounds=2, steps=3)
    one, other = losses.values()
    assert one == other and len(set(one)) == 7 * 2


def test_step_times_exclude_other_side_and_rounds_give_speeds(monkeypatch):
    """Either side may run first in a step."""
    clock = [0.0]
    monkeypatch.setattr("crosshead.evals.bench.pairs.time.perf_counter", lambda: clock[0])

    def steps(*taken):
        def run(rest):
            for seconds in taken:
                clock[0] += seconds
                rest()

        return run

    ours, stock = steps(1000, 1, 2, 3, 500), steps(2000, 10, 20, 30, 500)
    assert module._step_times(ours, stock, 4) == [[1000, 1, 2, 3], [2000, 10, 20, 30]]
    assert module._speeds([1, 3, 2, 6], steps=2) == [2 * 4 * 32 / 4, 2 * 4 * 32 / 8]


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
    for command, status, words in (
        ("bench train explict", 1, "'explicit'"),
        (f"bench train explicit --out {tmp_path}/b/a.json", 1, f"{tmp_path}/b/a.json"),
        ("bench train --steps 0", 2, "--steps"),
        ("bench train --device tpu", 2, "'tpu'"),
        ("bench train --device cuda", 1, "--device cuda"),
        ("bench tran", 2, "'train'"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        exit_status, out, err = run(capfd, monkeypatch, command)
        assert (exit_status, out) == (status, "") and words in err and "Traceback" not in err
