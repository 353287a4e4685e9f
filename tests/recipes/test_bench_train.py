"""`crosshead bench train`: both sides train the same model on the same batches with the same settings, in turn."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import Trainer

from broken import run
from crosshead.recipes import bench_train as module
from crosshead.recipes.bench_train import CASES, bench_train, bench_train_lines
from crosshead.recipes.load_recipe import load_recipe
from crosshead.recipes.run_trainer import RunTrainer
from crosshead.recipes.train import train

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "SHAPE", module.SHAPE | SMALL)
    monkeypatch.setattr(module, "LENGTH", 32)


@pytest.fixture
def seen(monkeypatch):
    """Of each run, in turn: the trainer, and the tokens of its micro batches."""
    runs = []
    train, step = Trainer.train, Trainer.training_step

    def training(self, *args, **kwargs):
        runs.append((self, []))
        return train(self, *args, **kwargs)

    def stepping(self, model, inputs, *args, **kwargs):
        runs[-1][1].append({name: value.clone() for name, value in inputs.items()})
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train", training)
    monkeypatch.setattr(Trainer, "training_step", stepping)
    return runs


def test_both_sides_do_the_same_work_in_turn(seen):
    report = bench_train(["explicit", "mixture"], rounds=2, steps=3)
    kinds = [isinstance(trainer, RunTrainer) for trainer, _ in seen]
    assert kinds == [False, True, False, True, True, False, True, False]
    assert [bool(getattr(trainer.model.config, "mixers", None)) for trainer, _ in seen] == kinds
    (stock, theirs), (ours, mine) = seen[:2]
    for name, value in module.SHAPE.items():
        assert getattr(stock.model.config, name) == getattr(ours.model.config, name) == value
    same = set(vars(stock.args)) - {"output_dir", "logging_dir", "accelerator_config", "distributed_state"}
    assert {name: getattr(stock.args, name) for name in same} == {name: getattr(ours.args, name) for name in same}
    assert len(theirs) == len(mine) == 3 * 2  # two micro batches a step
    assert [sorted(each) for each in theirs] == [sorted(each) for each in mine] == 6 * [["input_ids", "labels"]]
    rows = [{tuple(row.tolist()) for batch in found for row in batch["input_ids"]} for found in (theirs, mine)]
    assert rows[0] == rows[1] and len(rows[0]) > 6
    assert {part.dtype for part in stock.model.parameters()} == {torch.float32}
    figures = report["tokens_per_second"]
    assert list(figures) == ["explicit", "mixture"] and figures["mixture"]["mixers"] == CASES["mixture"]
    for found in figures.values():
        assert [len(found[key]) for key in ("ours", "stock", "ratios")] == [2, 2, 2]
        assert found["ratios"][1] == found["ours"][1] / found["stock"][1]
        assert min(found["ratios"]) <= found["median_ratio"] <= max(found["ratios"])
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["threads"] == torch.get_num_threads()
    assert [line.split()[0] for line in bench_train_lines(report)] == ["tokens", "explicit", "mixture"]


def test_a_case_is_what_recipes_of_that_form_train():
    for name in ("papers/kha_dense_0.61b", "small/smollm2_knocking", "small/qwen3_0.6b_knocking"):
        ours = load_recipe(name).model.config["mixers"]["knocking"]
        assert CASES[f"knocking-{ours['form']}"]["knocking"].get("on", ["value"]) == ours.get("on", ["value"]), name


def test_a_run_that_is_told_to_stop_ends_the_measurement(monkeypatch):
    """Its steps were not all timed."""
    monkeypatch.setattr(module, "train", lambda recipe, note: replace(train(recipe, note), model=None))
    with pytest.raises(KeyboardInterrupt):
        bench_train(["explicit"], rounds=1, steps=2)


def test_the_command(tmp_path, monkeypatch, capfd):
    command = f"bench train knocking-mlp --rounds 1 --steps 2 --out {tmp_path}/a.json"
    status, out, err = run(capfd, monkeypatch, command)
    assert status == 0 and out.splitlines()[1].startswith("knocking-mlp ")
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["settings"]["rounds"], report["settings"]["steps"]) == (1, 2)
    assert report["shape"]["hidden_size"] == 32
    for command, status, words in (
        ("bench train explict", 1, "bench train has no case 'explict': did you mean 'explicit'?"),
        (f"bench train explicit --out {tmp_path}/b/a.json", 1, "is in a folder that does not exist"),
        ("bench train --steps 1", 2, "--steps"),
        ("bench tran", 2, "Did you mean 'train'"),
    ):
        found, out, err = run(capfd, monkeypatch, command)
        assert (found, out) == (status, "") and words in err and "Traceback" not in err
