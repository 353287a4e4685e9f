"""Runs that fail or are interrupted: the files that they leave, and how the next run continues."""

import errno
import json
import os
from pathlib import Path

import pytest

from crosshead.common.errors import ConversionError
from crosshead.conversion.sources.tensor_store import Entry
from crosshead.conversion.writing import atomic_output as module
from crosshead.conversion.writing.atomic_output import atomic_output
from crosshead.conversion.writing.shard_writer import write_shard
from output_toys import ONE, SHARDS, TWO, complete, items, names, refusal, run, stopped, write

ERRORS = [ConversionError, RuntimeError, MemoryError, OSError, KeyboardInterrupt]


@pytest.mark.parametrize("kind", ERRORS)
def test_error_keeps_finished_shards_for_next_run(tmp_path, kind):
    target, expected = tmp_path / "out", ConversionError if kind is OSError else kind
    with pytest.raises(expected, match="no") as caught, atomic_output(target, ONE, False) as output:
        output.expect(SHARDS)
        for file in list(SHARDS)[:2]:
            output.record(file, write_shard(output.folder / file, items(file)))
        (output.folder / "model-02.safetensors").write_text("half of it")
        raise kind("no")
    work = tmp_path / ".out.crosshead-partial"
    (note,) = caught.value.__notes__
    assert str(work) in note and "--restart" in note
    assert names(work / "model") == list(SHARDS)[:2]
    assert run(target) == list(SHARDS)[2:]
    assert complete(target) and names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ERRORS)
def test_error_before_first_shard_leaves_no_files(tmp_path, kind):
    expected = ConversionError if kind is OSError else kind
    with (
        pytest.raises(expected, match="no") as caught,
        atomic_output(tmp_path / "a" / "out", ONE, False) as output,
    ):
        output.expect(SHARDS)
        (output.folder / "model-00.safetensors").write_text("half of it")
        (output.work / "statistics.partial").write_text("half of it")
        raise kind("no")
    assert not hasattr(caught.value, "__notes__")
    assert names(tmp_path) == []


def test_model_that_fails_verification_is_kept(tmp_path):
    with pytest.raises(ConversionError) as caught, atomic_output(tmp_path / "out", ONE, False) as output:
        write(output)
        raise ConversionError("another model")
    folder = tmp_path / ".out.crosshead-partial" / "model"
    (note,) = caught.value.__notes__
    assert str(folder) in note and "--no-verify" in note
    assert complete(folder)
    assert run(tmp_path / "out") == []


def test_next_run_continues_interrupted_run(tmp_path):
    stopped(tmp_path / "out")
    assert names(tmp_path) == [".out.crosshead-partial"]
    assert run(tmp_path / "out") == list(SHARDS)[2:]
    assert complete(tmp_path / "out")


def test_next_run_rewrites_damaged_and_missing_shards(tmp_path):
    stopped(tmp_path / "out", stop=3)
    first, second, third = (tmp_path / ".out.crosshead-partial" / "model" / file for file in list(SHARDS)[:3])
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    (third.parent / "stray").mkdir()
    assert run(tmp_path / "out") == [first.name, second.name, "model-03.safetensors"]
    assert complete(tmp_path / "out")


def test_other_conversion_needs_restart_to_discard_work(tmp_path):
    stopped(tmp_path / "out")
    work = tmp_path / ".out.crosshead-partial"
    (work / "kept").write_text("old")
    message = refusal(tmp_path / "out", identity=TWO)
    assert str(work) in message and "--restart" in message
    assert "command" not in message
    assert names(work / "model") == list(SHARDS)[:2]
    with atomic_output(tmp_path / "out", TWO, False, restart=True) as output:
        assert not (output.work / "kept").exists()
        assert write(output) == list(SHARDS)


def test_restart_rewrites_all_shards_of_same_conversion(tmp_path):
    stopped(tmp_path / "out")
    assert run(tmp_path / "out", restart=True) == list(SHARDS)
    assert complete(tmp_path / "out")


def test_other_conversion_replaces_work_without_finished_shards(tmp_path):
    """A killed process leaves a journal without finished files."""
    work = tmp_path / ".out.crosshead-partial"
    (work / "model").mkdir(parents=True)
    (work / "journal.json").write_text(json.dumps({"identity": TWO, "finished": {}}))
    (work / "model" / "model-00.safetensors").write_text("half of it")
    assert run(tmp_path / "out") == list(SHARDS)


@pytest.mark.parametrize("journal", ["", "{", None, "[]", '{"identity": "of another version", "finished": {}}'])
def test_invalid_journal_rewrites_all_shards(tmp_path, journal):
    stopped(tmp_path / "out")
    path = tmp_path / ".out.crosshead-partial" / "journal.json"
    path.unlink() if journal is None else path.write_text(journal)
    assert run(tmp_path / "out") == list(SHARDS)


def test_interrupted_integrity_check_keeps_finished_shards(tmp_path, monkeypatch):
    def stop(path, *_):
        raise KeyboardInterrupt

    stopped(tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "is_intact", stop)
        run(tmp_path / "out")
    assert run(tmp_path / "out") == list(SHARDS)[2:]


def test_changed_shard_plan_discards_finished_shards(tmp_path):
    stopped(tmp_path / "out")
    with atomic_output(tmp_path / "out", ONE, False) as output:
        first = next(iter(SHARDS))
        output.expect({first: [Entry("0.weight", "F32", (5, 8))]})
        assert not output.finished
        assert names(output.folder) == []


def test_work_files_are_kept_for_next_run_and_not_published(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_output(tmp_path / "out", ONE, False) as output:
        (output.work / "statistics").write_text("counted")
        raise KeyboardInterrupt
    with atomic_output(tmp_path / "out", ONE, False) as output:
        assert (output.work / "statistics").read_text() == "counted"
        write(output)
        output.publish()
    assert complete(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_full_disk_error_keeps_finished_shards(tmp_path):
    def fill():
        with atomic_output(tmp_path / "out", ONE, False) as output:
            write(output)
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConversionError, match=r"full after 1\.03 KiB of 1\.03 KiB") as caught:
        fill()
    assert ".out.crosshead-partial" in caught.value.__notes__[0]
    assert run(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["a", "b", ".out.crosshead-partial", "lock", ".journal.json.partial", "model"])
def test_full_disk_at_start_leaves_no_files(tmp_path, monkeypatch, name):
    def without_room(make, begins=False):
        def made(path, *arguments, **options):
            if Path(path).name != name:
                return make(path, *arguments, **options)
            if begins:
                Path(path).touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        return made

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", without_room(Path.mkdir))
        patch.setattr(os, "open", without_room(os.open))
        patch.setattr(Path, "write_text", without_room(Path.write_text, begins=True))
        with pytest.raises(ConversionError, match="No space left"):
            run(tmp_path / "a" / "b" / "out")
    assert names(tmp_path) == []
    assert run(tmp_path / "a" / "b" / "out") == list(SHARDS)


def test_full_disk_at_start_keeps_finished_shards(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    stopped(tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(ConversionError, match="No space left"):
        patch.setattr(Path, "mkdir", full)
        run(tmp_path / "out")
    assert run(tmp_path / "out") == list(SHARDS)[2:]
