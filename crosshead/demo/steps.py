"""Named steps: a result is complete or absent, and is used again while the step's inputs are the same."""

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
WORK = ".work"
"""The folder for unfinished steps, from which an interrupted step continues."""
CONTINUE = "finished work is kept: repeat the command to continue"
DIGITS = 16
"""Length of a fingerprint."""
Make = Callable[[Path, Progress], object]
"""Takes a working directory of its own, which is kept until the step is done."""


@dataclass(frozen=True)
class Step:
    """One step of the demo."""

    name: str
    message: str
    """Shown when the step starts."""
    results: tuple[Path, ...]
    """Files or folders that `make` moves to their places when they are complete."""
    make: Make
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Inputs apart from other steps and versions."""
    needs: tuple[str, ...] = ()
    """The steps whose results this one reads."""


@dataclass(frozen=True)
class Screen:
    """Output of messages and progress."""

    tell: Callable[[str], None]
    """Prints a line."""
    watch: Callable[[], AbstractContextManager[Progress]]
    """Gives the progress display of a step."""


class Record:
    """The finished steps, in a JSON file that is written atomically."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.content: dict[str, Any] = {"steps": {}}
        if self.path.exists():
            self.content = read_record(self.path)

    def put(self, **changes: Any) -> None:
        """Set fields, and write the file."""
        self.content |= changes
        write_json(self.path, self.content)

    def done(self, name: str) -> dict[str, Any]:
        """The record of a finished step; empty for others."""
        return dict(self.content["steps"].get(name, {}))

    def note(self, name: str, found: Mapping[str, Any] | None) -> None:
        """Record a finished step, or with None remove its record."""
        others = {key: value for key, value in self.content["steps"].items() if key != name}
        self.put(steps=others if found is None else others | {name: dict(found)})


def read_record(path: Path) -> dict[str, Any]:
    """The record of an earlier run; `ValueError` for another kind of file."""
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
        line, found = f"[{number}/{len(steps)}] {step.message}", record.done(step.name)
        if found.get("identity") == fingerprint and all(path.exists() for path in step.results):
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
    """Equal for steps with the same inputs."""
    content = [step.name, step.settings, [fingerprints[name] for name in step.needs], versions()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _clear(step: Step, work: Path) -> None:
    """Remove results and unfinished work of other inputs; keep the unfinished work of the same inputs."""
    for path in step.results:
        remove(path)
    work.mkdir(parents=True, exist_ok=True)
    for path in work.parent.iterdir():
        if path != work:
            remove(path)


def _timed(step: Step, work: Path, screen: Screen) -> dict[str, float]:
    """Run a step; returns its wall-clock and CPU seconds, child processes included."""
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
