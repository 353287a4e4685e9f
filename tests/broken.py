"""Ways to damage a checkpoint, and helpers that run the command line in this process."""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from crosshead_command.main import main

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONVERT = "convert source out --mixer knocking"


def nothing(folder: Path) -> None:
    """Leave the checkpoint whole."""


@dataclass(frozen=True)
class Case:
    """A command that must fail with one line that contains `words`, after `damage` to its source."""

    words: str
    damage: Callable[[Path], object] = nothing
    command: str = CONVERT
    base: str = "one"
    """Name of the toy checkpoint that is the source."""


def edit_json(folder: Path, file: str, **changes: Any) -> None:
    """Set fields of a JSON file; a field set to `...` is taken out."""
    content = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def config(**changes: Any) -> Callable[[Path], object]:
    """Change fields of config.json."""
    return lambda folder: edit_json(folder, "config.json", **changes)


def weight_map(**changes: Any) -> Callable[[Path], object]:
    """Map tensors to other files in the index; `__` in keywords stands for a dot."""

    def damage(folder: Path) -> None:
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        edit_json(folder, INDEX, weight_map=files | {name.replace("__", "."): file for name, file in changes.items()})

    return damage


def write(file: str, content: str | bytes) -> Callable[[Path], object]:
    """Overwrite a file with the given content."""
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(raw)


def remove(*files: str) -> Callable[[Path], object]:
    """Remove files."""
    return lambda folder: [(folder / file).unlink() for file in files]


def cut(file: str, count: int) -> Callable[[Path], object]:
    """Truncate a file to `count` bytes, or by `-count` bytes if negative."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:count])


def state(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Edit the dictionary of tensors in place and save it again."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def value(name: str, number: float) -> Callable[[Path], object]:
    """Set the last element of a tensor."""
    return state(lambda tensors: tensors[name].view(-1)[-1:].fill_(number))


def both(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    """Apply several damages, one after the other."""
    return lambda folder: [damage(folder) for damage in damages]


def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str | list[str]) -> Any:
    """Run the command line in this process; return its exit status, stdout and stderr."""
    arguments = command.split() if isinstance(command, str) else command
    monkeypatch.setattr(sys, "argv", ["crosshead", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code, *capfd.readouterr()


def snapshot(folder: Path) -> dict[str, Any]:
    """Return path -> (mtime, digest) of every file below a folder; links map to their targets."""
    entries: dict[str, Any] = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            key = path.relative_to(folder).as_posix()
            status = path.lstat()
            if path.is_symlink():
                entries[key] = os.readlink(path)
            elif path.is_dir():
                entries[key] = "folder"
            else:
                entries[key] = (status.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
    return entries


def refused(case: Case, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a case's command offline in a folder; assert that it fails and prints one error line only."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    status, out, err = run(capfd, monkeypatch, case.command)
    assert (status, out) == (1, ""), err
    assert err.startswith("crosshead: error: ") and err.endswith("\n") and err.count("\n") == 1
    assert case.words in err
    assert "Traceback" not in err


def leaves_nothing(
    case: Case, bases: Path, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a case on a damaged copy of its checkpoint; assert that it fails and changes no file."""
    shutil.copytree(bases / case.base, folder / "source")
    case.damage(folder / "source")
    before = snapshot(folder)
    refused(case, folder, capfd, monkeypatch)
    assert snapshot(folder) == before


@contextmanager
def no_hang(seconds: int = 300) -> Iterator[None]:
    """Raise an AssertionError if the block takes longer than a time limit."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"no end after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
