"""A conversion that fails late keeps its work and names the folder; repeating the command continues it."""

import errno
import json
import os

import pytest

import crosshead
from broken import run
from crosshead.common.errors import ConversionError
from crosshead.conversion import convert, stages
from crosshead.conversion.calibration import calibration as calibrating
from crosshead.conversion.verification import reload, verify
from toy_checkpoints import MANY_SHARDS, write_stock

CONVERT = "convert source out --mixer knocking:form=linear"
WORK = ".out.crosshead-partial"


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_stock(tmp_path / "source", shard_size=MANY_SHARDS)
    return tmp_path


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def hidden_files(workdir):
    return [path.name for path in workdir.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("command", ["convert", "fold"])
def test_killed_reload_keeps_weights_for_next_run(workdir, capfd, monkeypatch, command):
    """The next run verifies the model again without writing weight files again."""
    if command == "fold":
        crosshead.convert("source", "ours", {"knocking": {"form": "linear"}}, verify=False)
    command_line = "fold ours out" if command == "fold" else CONVERT
    with monkeypatch.context() as patch:
        patch.setattr(verify, "reload_check", raising(ConversionError("it ended with status -9 (out of memory?)")))
        status, out, err = run(capfd, monkeypatch, command_line)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "status -9" in err and str(workdir / WORK / "model") in err
    for option in ("--no-verify", "--restart"):
        assert option in err
    assert not (workdir / "out").exists() and not (workdir / "out.conversion.json").exists()
    monkeypatch.setattr(stages, "write_shard", raising(AssertionError("written again")))
    report = (
        crosshead.fold("ours", "out")
        if command == "fold"
        else crosshead.convert("source", "out", {"knocking": {"form": "linear"}})
    )
    assert report["verification"]["reload"]["checked"] == "logits and text"
    assert hidden_files(workdir) == []


FAILURES = {
    "memory": MemoryError("no memory"),
    "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "stopped": KeyboardInterrupt(),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failure_while_writing_keeps_finished_shards(workdir, capfd, monkeypatch, kind):
    written, write_shard = [], stages.write_shard

    def limited(path, items):
        if len(written) == 3:
            raise FAILURES[kind]
        written.append(path.name)
        return write_shard(path, items)

    monkeypatch.setattr(stages, "write_shard", limited)
    status, _, err = run(capfd, monkeypatch, f"{CONVERT} --no-verify")
    assert status == (130 if kind == "stopped" else 1)
    assert err.count("\n") == 1 and str(workdir / WORK) in err
    assert sorted(path.name for path in (workdir / WORK / "model").iterdir()) == sorted(written)
    before = list(written)
    recording = lambda path, items: written.append(path.name) or write_shard(path, items)  # noqa: E731
    monkeypatch.setattr(stages, "write_shard", recording)
    status, _, err = run(capfd, monkeypatch, "convert source out --mixer talking --no-verify")
    assert status == 1 and str(workdir / WORK) in err and "--restart" in err and "options" in err
    assert run(capfd, monkeypatch, f"{CONVERT} --no-verify")[0] == 0
    assert sorted(written) == sorted({*written}) and len(written) > len(before)
    assert hidden_files(workdir) == []


def test_restart_discards_kept_work(workdir, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ConversionError):
        patch.setattr(stages, "verify_folder", raising(ConversionError("no")))
        crosshead.convert("source", "out", {"talking": {}})
    crosshead.convert("source", "out", {"knocking": {}}, verify=False, restart=True)
    assert hidden_files(workdir) == []


def test_failed_conversion_keeps_calibration(workdir, monkeypatch):
    mixers = {"mixture": {"active_heads": "75%", "shared": "calibrated"}}
    (workdir / "text.txt").write_text(" ".join(f"w{number % 50}" for number in range(2000)))
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as caught:
        patch.setattr(convert, "convert_layers", raising(MemoryError("no memory")))
        crosshead.convert("source", "out", mixers, calibration="text.txt", verify=False)
    assert str(workdir / WORK) in caught.value.__notes__[0]
    monkeypatch.setattr(calibrating, "write_streamed", raising(AssertionError("calibrated again")))
    crosshead.convert("source", "out", mixers, calibration="text.txt", verify=False)
    assert hidden_files(workdir) == []


def test_killed_reload_process_keeps_model_folder(workdir, monkeypatch):
    worker = workdir / "dies.py"
    worker.write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(reload, "WORKER", worker)
    with pytest.raises(ConversionError, match="status -9") as caught:
        crosshead.convert("source", "out", {"knocking": {}})
    assert str(workdir / WORK / "model") in caught.value.__notes__[0]
    assert (workdir / WORK / "model" / "config.json").exists()


def test_fold_into_mount_point_writes_record_inside(workdir, monkeypatch):
    """All files, including the record, go into the mount point, since its parent folder is on another disk."""
    crosshead.convert("source", "ours", {"knocking": {"form": "linear"}}, verify=False)
    (workdir / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(workdir / "disk"))
    crosshead.fold("ours", "disk", verify=False)
    record = json.loads((workdir / "disk" / "conversion.json").read_text())
    assert record["command"] == "fold"
    assert sorted(path.name for path in workdir.iterdir()) == ["disk", "ours", "source"]
    assert "verification" in crosshead.verify("ours", "disk")
    assert "verification" in json.loads((workdir / "disk" / "conversion.json").read_text())


def test_overwrite_lists_and_keeps_other_files(workdir, capfd, monkeypatch):
    command = f"{CONVERT} --no-verify --overwrite"
    assert run(capfd, monkeypatch, command)[0] == 0
    (workdir / "out" / "README.md").write_text("a card")
    status, out, _ = run(capfd, monkeypatch, command)
    assert status == 0 and "README.md" in out
    assert (workdir / "out" / "README.md").read_text() == "a card"
