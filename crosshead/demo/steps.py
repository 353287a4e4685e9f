"""Runs named steps with atomic results; a finished step is not repeated while its inputs stay the same."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosshead.common.progress import Progress
from crosshead.conversion.sources.model_folder import versions, write_json

RECORD = "demo.json"
"""File with the record of the finished steps and the table of results."""
WORK = ".work"
"""Folder for the files of unfinished steps, from which an interrupted step continues."""
CONTINUE = "finished work is kept: repeat the command to continue"
"""Note of an error in a step."""
DIGITS = 16
"""Number of hexadecimal digits of a fingerprint."""
Make = Callable[[Path, Progress], object]
"""Function that runs a step; its working directory is kept until the step is done."""


@dataclass(frozen=True)
class Step:
    """A step of the demo."""

    name: str
    message: str
    """Line to show when the step starts."""
    results: tuple[Path, ...]
    """Files or folders that the step creates atomically."""
    make: Make
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the step, apart from the results of other steps and package versions."""
    needs: tuple[str, ...] = ()
    """Names of the steps whose results this step reads."""


@dataclass(frozen=True)
class Screen:
    """Output of messages and progress."""

    tell: Callable[[str], None]
    """Prints a line."""
    watch: Callable[[], AbstractContextManager[Progress]]
    """Returns a context with the progress display of a step."""


class Record:
    """The record of the finished steps, stored in a JSON file that is written atomically."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.content: dict[str, Any] = {"steps": {}}
        if self.path.exists():
            self.content = read_record(self.path)

    def put(self, **changes: Any) -> None:
        """Set fields of the record, and write the file."""
        self.content |= changes
        write_json(self.path, self.content)

    def done(self, name: str) -> dict[str, Any]:
        """The entry of a finished step; empty for an unfinished one."""
        return dict(self.content["steps"].get(name, {}))

    def note(self, name: str, entry: Mapping[str, Any] | None) -> None:
        """Set the entry of a finished step; None removes the entry."""
        others = {key: value for key, value in self.content["steps"].items() if key != name}
        self.put(steps=others if entry is None else others | {name: dict(entry)})


def read_record(path: Path) -> dict[str, Any]:
    """The record of an earlier run; `ValueError` if the file is not a record."""
    try:
        content = json.loads(path.read_bytes())
        steps = content["steps"]
        if not all(isinstance(step["identity"], str) for step in steps.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path} is not the record of a demo: choose another folder with --out, or remove it"
        ) from None
    return dict(content)


def run_steps(steps: Sequence[Step], folder: Path, screen: Screen) -> None:
    """Run the steps that are not done yet, in order."""
    record, fingerprints = Record(folder), dict[str, str]()
    for number, step in enumerate(steps, 1):
        fingerprints[step.name] = fingerprint = _fingerprint(step, fingerprints)
        line, entry = f"[{number}/{len(steps)}] {step.message}", record.done(step.name)
        if entry.get("identity") == fingerprint and all(path.exists() for path in step.results):
            screen.tell(f"{line}: done before")
            continue
        screen.tell(line)
        record.note(step.name, None)
        work = folder / WORK / step.name / fingerprint
        _clear(step, work)
        seconds = _timed(step, work, screen)
        record.note(step.name, {"identity": fingerprint, **seconds})
        shutil.rmtree(work)
    shutil.rmtree(folder / WORK, ignore_errors=True)


def _fingerprint(step: Step, fingerprints: Mapping[str, str]) -> str:
    """A hash of the inputs of a step: settings, the fingerprints of the steps it reads, and package versions."""
    content = [step.name, step.settings, [fingerprints[name] for name in step.needs], versions()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _clear(step: Step, work: Path) -> None:
    """Remove old results, and unfinished work for other inputs; create or keep `work`, for the current inputs."""
    for path in step.results:
        remove(path)
    work.mkdir(parents=True, exist_ok=True)
    for path in work.parent.iterdir():
        if path != work:
            remove(path)


def _timed(step: Step, work: Path, screen: Screen) -> dict[str, float]:
    """Run a step; return its wall-clock and CPU seconds, including child processes."""
    begun, before = time.perf_counter(), sum(os.times()[:4])
    with screen.watch() as show:
        try:
            step.make(work, show)
        except BaseException as error:
            error.__notes__ = [CONTINUE]  # notes of the step itself name options of other commands
            raise
    seconds = time.perf_counter() - begun
    screen.tell(f"      {seconds:.0f} s")
    return {"seconds": round(seconds, 1), "cpu_seconds": round(sum(os.times()[:4]) - before, 1)}


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
