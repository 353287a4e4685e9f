"""Checkpoints are published atomically, checked against the run, and loaded without trusting pickles."""

import fcntl
import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosshead.common.errors import RecipeError
from crosshead.recipes.schema.sections import MechanismOptions
from crosshead.recipes.trainer import checkpoints as module
from crosshead.recipes.trainer.checkpoints import checkpoints, claim_output, locked_output, publish, step_of
from toy_training import EXPERTS, KNOCKING, LORA, MIXTURE, killed, losses, toy_run, train, weights


def write_partial_checkpoint(output, step, content="x"):
    partial = output / ".partial" / f"checkpoint-{step}"
    (partial / "inside").mkdir(parents=True)
    (partial / "model").write_text(content)
    (partial / "inside" / "state").write_text(content)
    return partial


def checkpoint_steps(output):
    return [step_of(path) for path in checkpoints(output)]


@pytest.fixture(scope="module")
def cached_killed_run(tmp_path_factory):
    """A cached function that runs a shipped recipe at toy size and kills it after step 3 of 4."""

    @cache
    def made(name):
        recipe = toy_run(name, tmp_path_factory.mktemp("killed"))
        killed(recipe, 3)
        return recipe

    return made


@pytest.fixture
def killed_run(cached_killed_run, tmp_path):
    """Like `cached_killed_run`, with a copy of the output for this test."""

    def copied(name):
        recipe = cached_killed_run(name)
        shutil.copytree(recipe.output, tmp_path / "run")
        return replace(recipe, output=str(tmp_path / "run"))

    return copied


def test_publish_keeps_newest_checkpoints(tmp_path):
    for step in (2, 10, 4, 11):
        publish(write_partial_checkpoint(tmp_path, step), tmp_path, keep=2)
    assert checkpoint_steps(tmp_path) == [11, 10]
    assert [path.name for path in tmp_path.iterdir() if path.name != ".partial"] == [
        path.name for path in tmp_path.glob("checkpoint-1*")
    ]
    assert not list((tmp_path / ".partial").iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model").write_text("longer"),
        lambda path: (path / "inside" / "state").unlink(),
        lambda path: (path / "complete.json").unlink(),
        lambda path: (path / "complete.json").write_text("{"),
        lambda path: (path / "complete.json").write_text("[]"),
    ],
)
def test_damaged_checkpoint_is_skipped_and_replaced(damage, tmp_path, caplog):
    for step in (2, 4):
        publish(write_partial_checkpoint(tmp_path, step), tmp_path, keep=2)
    damage(tmp_path / "checkpoint-4")
    assert checkpoint_steps(tmp_path) == [2]
    assert "checkpoint-4" in caplog.text
    publish(write_partial_checkpoint(tmp_path, 4, "again"), tmp_path, keep=2)  # and written again
    assert checkpoint_steps(tmp_path) == [4, 2]


def test_other_folders_are_not_listed_as_checkpoints(tmp_path):
    for name in ("checkpoint-", "checkpoint-two", "checkpoint-4.old", "model"):
        (tmp_path / name).mkdir()
    write_partial_checkpoint(tmp_path, 7)
    assert checkpoint_steps(tmp_path) == []


@pytest.mark.parametrize("moment", range(12))
def test_interrupted_publish_leaves_complete_checkpoint(tmp_path, monkeypatch, moment):
    """Interrupts `publish` at each call that changes the disk."""
    publish(write_partial_checkpoint(tmp_path, 2), tmp_path, keep=1)
    partial, calls = write_partial_checkpoint(tmp_path, 4), []

    def counted(function):
        def call(*arguments, **options):
            calls.append(function)
            if len(calls) == moment:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for owner, name in ((Path, "rename"), (Path, "write_text"), (shutil, "rmtree"), (os, "fsync")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    try:
        publish(partial, tmp_path, keep=1)
    except KeyboardInterrupt:
        assert checkpoint_steps(tmp_path) in ([2], [4], [4, 2])
    else:
        assert moment == 0 or moment > len(calls)
        assert checkpoint_steps(tmp_path) == [4]


def test_move_synced_syncs_files_before_and_parent_after_rename(tmp_path, monkeypatch):
    forced, partial = [], write_partial_checkpoint(tmp_path, 2)
    monkeypatch.setattr(module, "sync", lambda path: forced.append((path, partial.exists())))
    module.move_synced(partial, tmp_path / "checkpoint-2")
    inside = {partial, partial / "model", partial / "inside", partial / "inside" / "state"}
    assert {path for path, before in forced if before} == inside
    assert forced[-1] == (tmp_path, False)


def test_claim_output_refuses_changed_run_with_checkpoints(tmp_path):
    run = {"data": "a", "train.seed": 1, "distillation": None}
    claim_output(tmp_path, {"data": "b"})
    claim_output(tmp_path, run)  # the other run has saved nothing yet
    publish(write_partial_checkpoint(tmp_path, 3), tmp_path, keep=1)
    claim_output(tmp_path, run)
    for other, key in (
        (run | {"train.seed": 2}, "train.seed=1.*2"),
        ({**run, "train.lora": 3}, "train.lora=None.*3"),
        ({"data": "a", "distillation": None}, "train.seed=1.*None"),
    ):
        with pytest.raises(RecipeError, match=key) as caught:
            claim_output(tmp_path, other)
        assert "\n" not in str(caught.value)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RecipeError, match=r"run\.json"):
        claim_output(tmp_path, run)


@pytest.mark.parametrize("name", ["checkpoint-3", "model", "checkpoint-7", "metrics.jsonl"])
def test_claim_output_refuses_folder_without_run_json(tmp_path, name):
    """Other tools use such names, too, so that a folder without run.json is refused."""
    publish(write_partial_checkpoint(tmp_path, 3), tmp_path, keep=1)
    (tmp_path / "checkpoint-3").rename(tmp_path / name)
    if name == "checkpoint-7":
        (tmp_path / name / "complete.json").unlink()
    with pytest.raises(RecipeError, match=r"run\.json"):
        claim_output(tmp_path, {})
    assert (tmp_path / name / "model").read_text() == "x"


def test_output_lock_refuses_second_run_and_bad_paths(tmp_path, monkeypatch, caplog):
    again = pytest.raises(RecipeError, match="run")
    with locked_output(tmp_path / "a" / "run"), again, locked_output(tmp_path / "a" / "run"):
        pass
    with locked_output(tmp_path / "a" / "run"):
        pass
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "run", "Not a directory")):
        with pytest.raises(RecipeError, match=f"output=.*{words}"), locked_output(path):
            pass

    def unknown(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with locked_output(tmp_path):
        assert str(tmp_path) in caplog.text


def test_run_resumes_from_newest_complete_checkpoint(tmp_path):
    whole, recipe = (toy_run(KNOCKING, tmp_path / name, steps=5) for name in ("whole", "damaged"))
    train(whole)
    killed(recipe, 5)
    newest = Path(recipe.output, "checkpoint-4")
    (newest / "optimizer.pt").write_bytes((newest / "optimizer.pt").read_bytes()[:-1])
    Path(recipe.output, ".partial", "checkpoint-99").mkdir(parents=True)
    train(recipe)
    assert losses(recipe) == losses(whole)
    result, expected = weights(recipe), weights(whole)
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert not Path(recipe.output, ".partial").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"])
def test_corrupt_checkpoint_file_of_right_size_is_refused(name, killed_run):
    recipe = killed_run(KNOCKING)
    path = Path(recipe.output, "checkpoint-2", name)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(RecipeError, match="checkpoint-2") as caught:
        train(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.rename(path.with_name("checkpoint-9")), r"trainer_state\.json"),
        (lambda path: (path / "optimizer.pt").unlink(), "optimizer"),
    ],
)
def test_checkpoint_with_wrong_step_or_missing_file_is_refused(change, words, killed_run, monkeypatch):
    recipe = killed_run(KNOCKING)
    change(Path(recipe.output, "checkpoint-2"))
    monkeypatch.setattr(module, "_is_complete", lambda checkpoint: True)
    with pytest.raises(RecipeError, match=rf"checkpoint-.*{words}"):
        train(recipe)


def rewrite_tensors(checkpoint, change):
    """Change the tensors of a checkpoint, and update complete.json so that it still counts as complete."""
    file = next(checkpoint.glob("*.safetensors"))
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    sizes = json.loads((checkpoint / "complete.json").read_text())
    (checkpoint / "complete.json").write_text(json.dumps(sizes | {file.name: file.stat().st_size}))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            KNOCKING,
            lambda tensors: {
                name: x for name, x in tensors.items() if not name.endswith("layers.3.mlp.up_proj.weight")
            },
        ),
        (KNOCKING, lambda tensors: tensors | {"model.layers.4.mlp.up_proj.weight": torch.ones(2)}),
        (
            EXPERTS,
            lambda tensors: {name.replace("experts.gate_up_proj", "experts.0"): x for name, x in tensors.items()},
        ),
        (LORA, lambda tensors: {"other": torch.ones(2)}),
    ],
)
def test_checkpoint_with_tensors_of_another_model_is_refused(name, change, killed_run):
    """transformers would continue, with the model's current values in place of missing tensors."""
    recipe = killed_run(name)
    checkpoint = Path(recipe.output, "checkpoint-2")
    rewrite_tensors(checkpoint, change)
    with pytest.raises(RecipeError, match="checkpoint-2") as caught:
        train(recipe)
    assert "\n" not in str(caught.value)


def test_run_without_checkpoint_starts_from_first_step(killed_run):
    recipe = killed_run(KNOCKING)
    shutil.rmtree(Path(recipe.output, "checkpoint-2"))
    assert train(recipe).model and len(losses(recipe)) == 4


def test_resume_loads_weights_only_and_run_writes_no_bin_files(killed_run, monkeypatch):
    recipe = killed_run(LORA)
    loads, load = [], torch.load

    def watched(file, *arguments, weights_only=True, **options):
        loads.append((Path(file).name, weights_only))
        return load(file, *arguments, weights_only=weights_only, **options)

    monkeypatch.setattr(torch, "load", watched)
    train(recipe)
    assert {name for name, _ in loads} == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert all(safe for _, safe in loads)
    assert not list(Path(recipe.output).rglob("*.bin"))


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("train", {"learning_rate": 0.5}, r"train.learning_rate="),
        ("train", {"seed": 4}, r"train\.seed=0.*4"),
        ("train", {"tokens": 4096}, r"(steps=4|train.tokens=1024)"),
        ("train", {"weight_decay": 0.3}, r"train\.weight_decay=0\.1.*0\.3"),
        ("train", {"mechanisms": MechanismOptions(weight_decay=0.3)}, r"train.mechanisms="),
        ("data", {"separate_documents": True}, r"on other data"),
        ("data", {"length": 128}, r"on other data"),
        ("distillation", {"temperature": 2.0}, r"distillation\.temperature=1\.0.*2\.0"),
        ("distillation", None, r"distillation.*None"),
    ],
)
def test_resume_with_changed_recipe_is_refused(section, values, key, killed_run):
    recipe = killed_run(MIXTURE)
    before = {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("checkpoint-2/*")}
    other = replace(recipe, **{section: values and replace(getattr(recipe, section), **values)})
    with pytest.raises(RecipeError, match=key) as caught:
        train(other)
    assert "\n" not in str(caught.value) and recipe.output in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("checkpoint-2/*")} == before
