"""SIGTERM ends a command like Ctrl-C: with cleanup and a one-line message, but exit status 143."""

import os
import signal
import tempfile

import pytest

from broken import run
from crosshead.conversion import convert as module
from toy_checkpoints import write_stock


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    write_stock(tmp_path / "source")
    return tmp_path


def test_sigterm_removes_temporary_files_of_conversion(workspace, capfd, monkeypatch):
    scratch_files = []

    def interrupted(*arguments, **options):
        scratch_files.extend((workspace / "scratch").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "make_plan", interrupted)
    status, out, err = run(capfd, monkeypatch, "convert source out --mixer knocking")
    assert (status, out) == (143, "") and err.splitlines()[-1].startswith("crosshead: terminated: "), err
    assert scratch_files and not [*(workspace / "scratch").iterdir()] and not (workspace / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_handler_of_the_caller_is_kept(workspace, capfd, monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run(capfd, monkeypatch, "cost source")[0] == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
