"""Publishing a finished model: existing targets, interruptions, mount points and folders without permission."""

import errno
import json
import os
import shutil
import subprocess
from itertools import product

import pytest

from crosshead.common.errors import ConversionError
from crosshead.conversion.writing import atomic_output as module
from crosshead.conversion.writing import work_folder
from crosshead.conversion.writing.atomic_output import atomic_output
from output_toys import ONE, SHARDS, TWO, complete, fill, names, old_model, refusal, run, stopped, write


def test_only_models_and_empty_folders_are_overwritten(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "dangling").symlink_to("gone")
    for name in ("home", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "home" / "letters").write_text("")
    old_model(tmp_path, "model")
    old_model(tmp_path, "trained")
    (tmp_path / "trained" / "checkpoint-500").mkdir()
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "config.json").write_text("{}")
    others = ("file", "link", "dangling", "home", "trained", "program")
    assert "--overwrite" in refusal(tmp_path / "model")
    for name, overwrite in product(others, (False, True)):  # --overwrite is not suggested where it would not help
        message = refusal(tmp_path / name, overwrite=overwrite)
        assert str(tmp_path / name) in message and "not overwritten" in message and "--overwrite" not in message
    for name, overwrite in (("model", True), ("empty", False)):
        run(tmp_path / name, overwrite=overwrite)
        assert complete(tmp_path / name)
    assert names(tmp_path) == sorted((*others, "model", "empty"))


def test_old_model_stays_until_publish(tmp_path):
    old_model(tmp_path)
    stopped(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert run(tmp_path / "out", overwrite=True) == list(SHARDS)[2:]
    assert complete(tmp_path / "out")


def test_empty_target_folder_keeps_inode_and_mode(tmp_path):
    (tmp_path / "out").mkdir(mode=0o750)
    before = (tmp_path / "out").stat()
    run(tmp_path / "out")
    after = (tmp_path / "out").stat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert complete(tmp_path / "out") and names(tmp_path) == ["out"]


def test_target_created_during_run_is_not_replaced(tmp_path):
    with (
        pytest.raises(ConversionError, match=str(tmp_path / "out")),
        atomic_output(tmp_path / "out", ONE, False) as output,
    ):
        write(output)
        old_model(tmp_path)
        output.publish()
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert complete(tmp_path / ".out.crosshead-partial" / "model")
    assert run(tmp_path / "out", overwrite=True) == []
    assert complete(tmp_path / "out")


OLD = {
    "config.json": '{"auto_map": {"AutoConfig": "code.Config", "AutoTokenizer": ["gone.T", null]}}',
    "code.py": "from .more import x",
    "more.py": "x = 1",
    "model.safetensors.index.json": '{"weight_map": {"a": "own-name.safetensors", "b": "notes.txt"}}',
    "own-name.safetensors": "old",
    "model.safetensors": "old",
    "model-00001-of-00002.safetensors": "old",
    "tokenizer.json": "old",
    "LICENSE": "old",
    "conversion.json": "old",
    "evaluation.json": "old",
    "additional_chat_templates/tool.jinja": "old",
}


OTHERS = {
    "README.md": "a card",
    "notes.txt": "mine",  # although the old model's index names it
    "run.py": "mine",
    "lora.safetensors": "mine",
    ".gitattributes": "",
}


def test_overwrite_replaces_model_files_and_keeps_others(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD | OTHERS)
    with atomic_output(target, ONE, True) as output:
        write(output)
        (output.folder / "additional_chat_templates").mkdir()
        (output.folder / "additional_chat_templates" / "new.jinja").write_text("new")
        assert output.publish() == sorted(OTHERS)
    assert names(target) == sorted([*SHARDS, "config.json", "additional_chat_templates", *OTHERS])
    assert names(target / "additional_chat_templates") == ["new.jinja"]
    assert {name: (target / name).read_text() for name in OTHERS} == OTHERS
    assert (target / "config.json").read_text() == "{}"


@pytest.mark.parametrize("moved", range(5))
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_interrupted_replacement_is_completed_by_next_run(tmp_path, monkeypatch, moved, kind):
    """An interrupted replacement never leaves a mix of two models."""
    target, done, replace = tmp_path / "out", [], os.replace
    old_model(tmp_path)
    fill(target, OTHERS)

    def failing(path, destination):
        if len(done) == moved and os.path.dirname(destination) == str(target):
            raise kind
        done.append(destination) if os.path.dirname(destination) == str(target) else None
        replace(path, destination)

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, ConversionError)) as caught:
        patch.setattr(work_folder.os, "replace", failing)
        run(target, overwrite=True)
    assert str(tmp_path / ".out.crosshead-partial") in caught.value.__notes__[0]
    assert not (target / "config.json").exists()
    with pytest.raises(ConversionError, match="--overwrite"):
        run(target)
    assert names(target) == sorted([*SHARDS, "config.json", *OTHERS])
    assert names(tmp_path) == ["out"]


def test_work_folder_without_model_is_removed_by_next_run(tmp_path):
    stopped(tmp_path / "out")
    (tmp_path / ".out.crosshead-partial" / "model").rename(tmp_path / "out")
    with pytest.raises(ConversionError, match="not overwritten"):
        run(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == list(SHARDS)[:2]


@pytest.mark.parametrize(
    ("planted", "removed"),
    [
        ({}, ["thesis"]),
        ({}, ["../thesis"]),
        ({}, ["/thesis"]),
        ({}, [".."]),
        ({}, [""]),
        ({}, {"a": "thesis"}),
        ({"model/thesis/text": "other"}, []),
        ({"siblings/thesis.txt": "other"}, []),
        ({"siblings/out.py": "other"}, None),
    ],
    ids=str,
)
def test_planted_work_folder_removes_no_folder_and_no_file_elsewhere(planted, removed, tmp_path):
    """A folder with the name of a work folder may come from an archive; without publish.json, only siblings move."""
    whole = {"model/config.json": "{}", "publish.json": json.dumps(removed)}
    fill(tmp_path / ".out.crosshead-partial", planted | (whole if removed is not None else {}))
    mine = {"thesis/text": "mine", "thesis.txt": "mine", "out.py": "mine"}
    for folder in (tmp_path, tmp_path / "out"):
        fill(folder, mine)
    with pytest.raises(ConversionError, match=r"\.out\.crosshead-partial was not written by crosshead"):
        run(tmp_path / "out", overwrite=True)
    for name, folder in product(mine, (tmp_path, tmp_path / "out")):
        assert (folder / name).read_text() == "mine"


@pytest.mark.parametrize("linked", ["", "model", "siblings"])
def test_linked_work_folder_is_refused(linked, tmp_path):
    work, docs = tmp_path / ".out.crosshead-partial", tmp_path / "docs"
    fill(docs, {"text": "mine"})
    if linked:
        work.mkdir()
    (work / linked).symlink_to(docs)
    with pytest.raises(ConversionError, match="was not written by crosshead"):
        run(tmp_path / "out")
    assert (docs / "text").read_text() == "mine" and not (tmp_path / "out").exists()


@pytest.fixture
def fake_mount_point(tmp_path, monkeypatch):
    """A fake mount point: it cannot be renamed, and no file can be moved into it from outside."""
    target, rename = tmp_path / "out", os.rename
    target.mkdir()
    (target / "lost+found").mkdir()

    def across(path, destination):
        inside = [target in (each, *each.parents) for each in (tmp_path / path, tmp_path / destination)]
        if target in (path, destination) or inside[0] != inside[1]:
            raise OSError(errno.EBUSY if target in (path, destination) else errno.EXDEV, "across")
        rename(path, destination)

    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(target))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, across)
    return target


def test_mount_point_is_published_from_work_folder_inside(fake_mount_point, tmp_path, monkeypatch):
    """The free space of the mount point's own disk counts."""
    measured, usage = [], module.shutil.disk_usage
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: measured.append(path) or usage(path))
    stopped(fake_mount_point)
    assert names(fake_mount_point) == [".crosshead-partial", "lost+found"] and names(tmp_path) == ["out"]
    assert "--restart" in refusal(fake_mount_point, identity=TWO)
    assert run(fake_mount_point) == list(SHARDS)[2:]
    assert set(measured) == {fake_mount_point / ".crosshead-partial"}
    assert names(fake_mount_point) == sorted([*SHARDS, "config.json", "lost+found"])
    assert "--overwrite" in refusal(fake_mount_point)
    fill(fake_mount_point, OTHERS)
    run(fake_mount_point, identity=TWO, overwrite=True)
    assert names(fake_mount_point) == sorted([*SHARDS, "config.json", "lost+found", *OTHERS])
    assert names(tmp_path) == ["out"]


def test_files_are_copied_if_rename_crosses_disks(fake_mount_point, monkeypatch):
    """E.g. into a bind mount, which `ismount` does not recognise."""
    monkeypatch.setattr(os.path, "ismount", lambda path: False)
    with atomic_output(fake_mount_point, ONE, False) as output:
        assert output.work.parent == fake_mount_point.parent
        write(output)
        (output.folder / "additional_chat_templates").mkdir()
        (output.folder / "additional_chat_templates" / "new.jinja").write_text("new")
        output.publish()
    assert names(fake_mount_point) == sorted([*SHARDS, "config.json", "lost+found", "additional_chat_templates"])
    assert names(fake_mount_point.parent) == ["out"]


def test_unwritable_parent_moves_work_folder_into_target(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    stopped(tmp_path / "out")
    assert names(tmp_path / "out") == [".crosshead-partial"]
    run(tmp_path / "out")
    assert complete(tmp_path / "out")


def test_unwritable_target_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "out")
    assert str(tmp_path / "out") in refusal(tmp_path / "out")


def mount(*arguments):
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root may mount")
    if subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "bound"])
def test_real_mount_point_is_published_and_overwritten(tmp_path, kind):
    target = tmp_path / "out"
    target.mkdir()
    (tmp_path / "place").mkdir()
    mount("-t", "tmpfs", "tmpfs", target) if kind == "disk" else mount("--bind", tmp_path / "place", target)
    try:
        stopped(target)
        assert names(target) == ([".crosshead-partial"] if kind == "disk" else [])
        assert run(target) == list(SHARDS)[2:]
        assert complete(target)
        fill(target, OTHERS)
        run(target, identity=TWO, overwrite=True)
        assert names(target) == sorted([*SHARDS, "config.json", *OTHERS])
        assert names(tmp_path) == ["out", "place"]
    finally:
        subprocess.run(["umount", str(target)], check=True)
