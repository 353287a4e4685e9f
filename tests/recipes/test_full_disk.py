"""Full disks: a one-line error, earlier checkpoints stay intact, and the run continues once there is space."""

import errno
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crosshead.common.errors import RecipeError
from crosshead.recipes import train as module
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import toy_in_own_folder
from crosshead.recipes.trainer.checkpoints import checkpoints, writing
from crosshead.recipes.trainer.teacher_logits import save_teacher
from tiers import first
from toy_training import KNOCKING, LORA, MIXTURE, losses, toy_run, train, weights

SIZE = 4 << 20


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MB; the test is skipped where this user cannot mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill_disk(disk, left):
    """Fill a disk up to `left` free bytes."""
    with (disk / "filler").open("wb") as file:
        file.write(bytes(max(0, shutil.disk_usage(disk).free - left)))
        file.flush()
        os.fsync(file.fileno())


def fill_after_step(disk, left, step):
    """Return a progress callback that fills the disk after a step."""

    def show(stage, done, total, message=""):
        if stage == "training" and done == step and not (disk / "filler").exists():
            fill_disk(disk, left)

    return show


def recipes_on_disk(disk, name, tmp_path):
    recipe = toy_run(name, tmp_path / "toy", steps=5)
    return recipe, replace(recipe, output=str(disk / "run"))


def file_contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_training_refused(recipe, words, progress=module.silent):
    with pytest.raises(RecipeError, match=words) as caught:
        train(recipe, progress)
    message = str(caught.value)
    assert "\n" not in message and recipe.output in message


def assert_run_resumes(recipe, whole, disk):
    (disk / "filler").unlink()
    train(recipe)
    train(whole)
    assert losses(recipe) == losses(whole)
    result, expected = weights(recipe), weights(whole)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", first([(20_000, KNOCKING), (150_000, KNOCKING), (300_000, LORA)]))
def test_full_disk_during_checkpoint(case, small_disk, tmp_path):
    left, name = case
    whole, recipe = recipes_on_disk(small_disk, name, tmp_path)
    words = r"step 4.*whose disk has [\d.]+ (bytes|KiB) free"
    assert_training_refused(recipe, words, fill_after_step(small_disk, left, 3))
    checkpoint = Path(recipe.output, "checkpoint-2")
    assert checkpoint.is_dir() and not list(Path(recipe.output).glob(".partial/*"))
    before = file_contents(checkpoint)
    assert_training_refused(recipe, r"(step 4|metrics\.jsonl).*resumes from checkpoint-2, ")
    assert file_contents(checkpoint) == before
    assert_run_resumes(recipe, whole, small_disk)


def test_full_disk_during_metrics(small_disk, tmp_path):
    whole = toy_run(KNOCKING, tmp_path / "toy", steps=12, checkpoints={"every": 20})
    recipe = replace(whole, output=str(small_disk / "run"))
    assert_training_refused(
        recipe,
        r"metrics\.jsonl.*No space left on device; the same command starts again$",
        fill_after_step(small_disk, 0, 1),
    )
    assert_run_resumes(recipe, whole, small_disk)


def test_full_disk_while_saving_result(small_disk, tmp_path, monkeypatch):
    whole, recipe = recipes_on_disk(small_disk, KNOCKING, tmp_path)
    finish = module._save

    def full(*arguments):
        fill_disk(small_disk, 100_000)
        finish(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_save", full)
        assert_training_refused(recipe, "model")
    assert not Path(recipe.output, "model").exists()
    assert_run_resumes(recipe, whole, small_disk)


def test_full_disk_before_start(small_disk, tmp_path):
    _, recipe = recipes_on_disk(small_disk, KNOCKING, tmp_path)
    fill_disk(small_disk, 0)
    with pytest.raises(RecipeError, match=r"output=.*No space left on device") as caught:
        train(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [".lock", "run.partial"])
def test_full_disk_for_lock_or_run_file_leaves_output_as_it_was(name, tmp_path, monkeypatch):
    opened, recipe = Path.open, toy_run(KNOCKING, tmp_path / "toy")

    def full(path, *arguments, **options):
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        assert_training_refused(recipe, r"output=.*No space left on device")
        assert not Path(recipe.output).exists()
        Path(recipe.output).mkdir()
        assert_training_refused(recipe, r"output=.*No space left on device")
        assert Path(recipe.output).is_dir()


@pytest.mark.parametrize("left", [0, 4096, 50_000])
def test_full_disk_while_writing_toy(left, small_disk):
    fill_disk(small_disk, left)
    with pytest.raises(RecipeError, match=r"^--toy=.*No space left on device") as caught:
        toy_in_own_folder(load_recipe(KNOCKING), small_disk / "toy")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("left", [0, 100_000])
def test_full_disk_while_saving_teacher_logits(left, small_disk, tmp_path):
    recipe = toy_run(MIXTURE, tmp_path / "toy")
    fill_disk(small_disk, left)
    with pytest.raises(RecipeError, match=r"logits.*No space left") as caught:
        save_teacher(recipe, small_disk / "logits")
    assert "\n" not in str(caught.value)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_read_only_disk_is_refused(small_disk, tmp_path):
    _, recipe = recipes_on_disk(small_disk, KNOCKING, tmp_path)
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be made read-only here")
    assert_training_refused(recipe, r"output=.*Read-only file system")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_partial_model_is_removed_after_interrupted_saving(tmp_path, error):
    partial = tmp_path / ".partial" / "model"
    partial.mkdir(parents=True)
    with pytest.raises(RecipeError if error is OSError else error), writing("the model", tmp_path):
        raise error
    assert not partial.exists()


def test_other_processes_leave_partial_files_to_the_main_process(tmp_path, monkeypatch):
    monkeypatch.setattr("crosshead.recipes.trainer.checkpoints.is_main_process", lambda: False)
    partial = tmp_path / ".partial" / "model"
    partial.mkdir(parents=True)
    with pytest.raises(RecipeError, match="main process"), writing("the model", tmp_path):
        raise OSError("Connection closed by peer")
    assert partial.exists()


def test_checkpoints_left_by_a_killed_run_are_removed(tmp_path):
    """A process killed between the last checkpoint and the removal of older ones leaves more than `keep`."""
    recipe = toy_run(KNOCKING, tmp_path)
    recipe = replace(recipe, checkpoints=replace(recipe.checkpoints, every=1, keep=9))
    train(recipe)
    output = Path(recipe.output)
    assert len(checkpoints(output)) == recipe.steps > 2
    shutil.rmtree(output / "model")
    train(replace(recipe, checkpoints=replace(recipe.checkpoints, keep=2)))
    assert len(checkpoints(output)) == 2 and (output / "model").is_dir()
    assert not (output / ".partial").exists()
