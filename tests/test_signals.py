"""SIGTERM ends a command as Ctrl-C does: with its cleanup, in one line, with a status of its own."""

import os
import signal
import tempfile

import pytest

from broken import run
from crosshead.conversion import convert as module
from toy_checkpoints import write_stock


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    write_stock(tmp_path / "source")
    return tmp_path


def test_the_cleanup_of_a_conversion(place, capfd, monkeypatch):
    seen = []

    def interrupted(*given, **options):
        seen.extend((place / "scratch").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "make_plan", interrupted)
    found, out, err = run(capfd, monkeypatch, "convert source out --mixer knocking")
    assert (found, out) == (143, "") and err.splitlines()[-1].startswith("crosshead: terminated: "), err
    assert seen and not [*(place / "scratch").iterdir()] and not (place / "out").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_caller_stays(place, capfd, monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run(capfd, monkeypatch, "cost source")[0] == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
