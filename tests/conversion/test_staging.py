import errno
import os
import re
from collections import namedtuple
from functools import partial

import pytest
import torch

from crosshead.conversion import staging as module
from crosshead.conversion.errors import ConversionError
from crosshead.conversion.shard_writer import tensor_chunks, write_shard
from crosshead.conversion.staging import check_apart, staging
from crosshead.conversion.store import Entry

SHARDS = {f"model-{shard:02d}.safetensors": [Entry(f"{shard}.weight", "F32", (8, 5))] for shard in range(4)}


def write(stage, shards=SHARDS, stop=None):
    """Write the missing shards, or all up to `stop`; returns those that were written."""
    stage.expect(shards)
    written = [file for file in shards if file not in stage.finished]
    for number, file in enumerate(written):
        if number == stop:
            raise KeyboardInterrupt
        tensors = [
            (entry, partial(tensor_chunks, torch.full(entry.shape, float(file[6:8])))) for entry in shards[file]
        ]
        stage.record(file, write_shard(stage.folder / file, tensors))
    (stage.folder / "config.json").write_text("{}")
    return written


def run(target, identity="one", overwrite=False, stop=None):
    with staging(target, identity, overwrite) as stage:
        written = write(stage, stop=stop)
        stage.publish()
    return written


def stopped(target, identity="one", overwrite=False, stop=2):
    with pytest.raises(KeyboardInterrupt):
        run(target, identity, overwrite, stop)


def refusal(target, **options):
    before = names(target.parent)
    with pytest.raises(ConversionError) as caught:
        run(target, **options)
    assert "\n" not in str(caught.value)
    assert names(target.parent) == before
    return str(caught.value)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None


def complete(target):
    return names(target) == sorted([*SHARDS, "config.json"])


def test_only_the_target_is_left(tmp_path):
    assert run(tmp_path / "out") == list(SHARDS)
    assert complete(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_nothing_is_there_before_the_end(tmp_path):
    with staging(tmp_path / "out", "one", False) as stage:
        write(stage)
        assert not (tmp_path / "out").exists()
        assert names(tmp_path) == [".out.crosshead-partial"]
        stage.publish()
        assert complete(tmp_path / "out")


@pytest.mark.parametrize("error", [ConversionError("no"), RuntimeError("no"), OSError(errno.EIO, "no")])
def test_an_error_leaves_nothing(tmp_path, error):
    with (
        pytest.raises((ConversionError, RuntimeError), match="no"),
        staging(tmp_path / "a" / "out", "one", 0) as stage,
    ):
        write(stage)
        raise error
    assert names(tmp_path) == []


def test_no_publishing_leaves_nothing(tmp_path):
    with staging(tmp_path / "a" / "b" / "out", "one", False) as stage:
        write(stage)
    assert names(tmp_path) == []


def test_parents_are_made(tmp_path):
    run(tmp_path / "a" / "b" / "out")
    assert complete(tmp_path / "a" / "b" / "out")


def test_next_run_goes_on(tmp_path):
    stopped(tmp_path / "out")
    assert names(tmp_path) == [".out.crosshead-partial"]
    assert run(tmp_path / "out") == list(SHARDS)[2:]
    assert complete(tmp_path / "out")


def test_next_run_checks_what_it_finds(tmp_path):
    stopped(tmp_path / "out", stop=3)
    first, second, third = (tmp_path / ".out.crosshead-partial" / "model" / file for file in list(SHARDS)[:3])
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    (third.parent / "stray").mkdir()
    assert run(tmp_path / "out") == [first.name, second.name, "model-03.safetensors"]
    assert complete(tmp_path / "out")


def test_another_conversion_starts_afresh(tmp_path):
    stopped(tmp_path / "out")
    (tmp_path / ".out.crosshead-partial" / "kept").write_text("old")
    with staging(tmp_path / "out", "two", False) as stage:
        assert not stage.keep("kept").exists()
        assert write(stage) == list(SHARDS)


@pytest.mark.parametrize("journal", ["", "{", None])
def test_lost_journal(tmp_path, journal):
    stopped(tmp_path / "out")
    path = tmp_path / ".out.crosshead-partial" / "journal.json"
    path.unlink() if journal is None else path.write_text(journal)
    assert run(tmp_path / "out") == list(SHARDS)


def test_other_plan_of_the_same_conversion(tmp_path):
    stopped(tmp_path / "out")
    with staging(tmp_path / "out", "one", False) as stage:
        first = next(iter(SHARDS))
        stage.expect({first: [Entry("0.weight", "F32", (5, 8))]})
        assert not stage.finished
        assert names(stage.folder) == []


def test_kept_files_wait_for_the_next_run_and_are_not_published(tmp_path):
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out", "one", False) as stage:
        stage.keep("statistics").write_text("counted")
        raise KeyboardInterrupt
    with staging(tmp_path / "out", "one", False) as stage:
        assert stage.keep("statistics").read_text() == "counted"
        write(stage)
        stage.publish()
    assert complete(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_two_runs_at_once(tmp_path):
    with staging(tmp_path / "out", "one", False) as stage:
        write(stage)
        for identity in ("one", "two"):
            assert str(tmp_path / "out") in refusal(tmp_path / "out", identity=identity)
        stage.publish()
    assert complete(tmp_path / "out")


def test_existing_targets(tmp_path):
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
    for name in (*others, "model", "empty"):
        assert "--overwrite" in refusal(tmp_path / name)
    for name in others:
        assert str(tmp_path / name) in refusal(tmp_path / name, overwrite=True)
    for name in ("model", "empty"):
        run(tmp_path / name, overwrite=True)
        assert complete(tmp_path / name)
    assert names(tmp_path) == sorted((*others, "model", "empty"))


def old_model(tmp_path, name="out"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("old")
    (tmp_path / name / "model.safetensors").write_text("old")


def test_old_target_stays_until_the_end(tmp_path):
    old_model(tmp_path)
    stopped(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert run(tmp_path / "out", overwrite=True) == list(SHARDS)[2:]
    assert complete(tmp_path / "out")


def test_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(ConversionError, match="out"), staging(tmp_path / "out", "one", False) as stage:
        write(stage)
        old_model(tmp_path)
        stage.publish()
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_killed_between_the_renames(tmp_path):
    old_model(tmp_path)
    stopped(tmp_path / "out", overwrite=True)
    (tmp_path / "out").rename(tmp_path / ".out.crosshead-replaced")
    with pytest.raises(ConversionError, match="--overwrite"):
        run(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert run(tmp_path / "out", overwrite=True) == list(SHARDS)[2:]


def test_killed_after_the_renames(tmp_path):
    stopped(tmp_path / "out")
    (tmp_path / ".out.crosshead-partial" / "model").rename(tmp_path / "out")
    old_model(tmp_path, ".out.crosshead-replaced")
    with pytest.raises(ConversionError, match="--overwrite"):
        run(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == list(SHARDS)[:2]


def test_failing_rename_puts_the_old_one_back(tmp_path):
    old_model(tmp_path)
    with pytest.raises(ConversionError, match="out"), staging(tmp_path / "out", "one", True) as stage:
        stage.folder.rmdir()
        stage.publish()
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_small_disk(tmp_path, monkeypatch):
    free = 600
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(10**6, 10**6 - free, free))
    assert re.search(r"0\.000 GB.*0\.000 GB", refusal(tmp_path / "out"))
    with pytest.raises(ConversionError, match=r"0\.000 GB"), staging(tmp_path / "out", "one", False) as stage:
        stage.check_room(601, 0)
    with pytest.raises(ConversionError, match=r"0\.000 GB"), staging(tmp_path / "out", "one", False) as stage:
        stage.check_room(400, 201)
    with pytest.raises(KeyError), staging(tmp_path / "out", "one", False) as stage:
        (stage.keep("seen.safetensors")).write_bytes(bytes(50))
        stage.check_room(400, 250)  # fifty of them are there already
        raise KeyError
    assert names(tmp_path) == []
    free = 10**6
    stopped(tmp_path / "out", stop=3)
    free = 300
    assert run(tmp_path / "out") == list(SHARDS)[3:]


def test_disk_full_meanwhile(tmp_path):
    def fill():
        with staging(tmp_path / "out", "one", False) as stage:
            write(stage)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConversionError, match=r"0\.000 GB"):
        fill()
    assert names(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "File exists" in refusal(tmp_path / "file" / "out")
    assert "too long" in refusal(tmp_path / ("x" * 250))
    assert "--overwrite" in refusal(tmp_path.__class__("/"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_parent(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path / "out")


def test_source_and_target_are_apart(tmp_path):
    (tmp_path / "link").symlink_to("source")
    source = tmp_path / "source"
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "away").symlink_to("elsewhere/deep")
    targets = [source, source / "out", tmp_path, tmp_path / "link", tmp_path / "link/a"]
    targets += [tmp_path / "elsewhere" / ".." / "source", tmp_path / "away" / ".." / "source"]
    for target in targets:
        with pytest.raises(ConversionError, match=re.escape(str(target))):
            check_apart(source, target)
    check_apart(source, tmp_path / "source2")
