"""Named steps: a result is complete or absent, and one that belongs to the same inputs is used again."""

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
"""Beside the record: what a step needs until its result is there, and what one that was stopped goes on from."""
IDENTITY = 16
"""Digits: enough to tell a few steps apart."""
Make = Callable[[Path, Progress], None]
"""Given a folder of its own, which stays until the step is done."""


@dataclass(frozen=True)
class Step:
    """One thing that the demo does."""

    name: str
    told: str
    """What a reader is told."""
    results: tuple[Path, ...]
    """Files or folders that `make` puts in their places when they are complete."""
    make: Make
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What decides the results besides other steps and versions."""
    needs: tuple[str, ...] = ()
    """The steps whose results it reads."""


@dataclass(frozen=True)
class Screen:
    """How the steps reach whoever watches."""

    tell: Callable[[str], None]
    """A line."""
    watch: Callable[[], AbstractContextManager[Progress]]
    """What a step is told to show while it works."""


class Record:
    """Which steps are done, in a file that is whole or absent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.content: dict[str, Any] = {"steps": {}}
        if self.path.exists():
            self.content = read_record(self.path)

    def put(self, **changes: Any) -> None:
        """Change it, and write it."""
        self.content |= changes
        write_json(self.path, self.content)

    def done(self, name: str) -> dict[str, Any]:
        """What is known of a step; nothing where it is to be made."""
        return dict(self.content["steps"].get(name, {}))

    def note(self, name: str, found: Mapping[str, Any] | None) -> None:
        """A step is done, or, with None, no longer."""
        others = {key: value for key, value in self.content["steps"].items() if key != name}
        self.put(steps=others if found is None else others | {name: dict(found)})


def read_record(path: Path) -> dict[str, Any]:
    """The record of an earlier run; `ValueError` where the file is something else."""
    try:
        content = json.loads(path.read_bytes())
        steps = content["steps"]
        if not all(isinstance(step["identity"], str) for step in steps.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path} is no record of a demo: choose another folder with --out, or remove it") from None
    return dict(content)


def run_steps(steps: Sequence[Step], folder: Path, screen: Screen) -> None:
    """Make what is not there yet, in order."""
    record, identities = Record(folder), dict[str, str]()
    for number, step in enumerate(steps, 1):
        identities[step.name] = identity = _identity(step, identities)
        line, found = f"[{number}/{len(steps)}] {step.told}", record.done(step.name)
        if found.get("identity") == identity and all(path.exists() for path in step.results):
            screen.tell(f"{line}: there already")
            continue
        screen.tell(line)
        record.note(step.name, None)
        work = folder / WORK / step.name / identity
        _clear(step, work)
        seconds = _timed(step, work, screen)
        record.note(step.name, {"identity": identity, **seconds})
        shutil.rmtree(work)
    shutil.rmtree(folder / WORK, ignore_errors=True)


def _identity(step: Step, identities: Mapping[str, str]) -> str:
    """Equal where the step would make the same."""
    content = [step.name, step.settings, [identities[name] for name in step.needs], versions()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:IDENTITY]


def _clear(step: Step, work: Path) -> None:
    """Take away results of other inputs, and what other inputs have left; keep what this very step has left."""
    for path in step.results:
        remove(path)
    work.mkdir(parents=True, exist_ok=True)
    for path in work.parent.iterdir():
        if path != work:
            remove(path)


def _timed(step: Step, work: Path, screen: Screen) -> dict[str, float]:
    """Make it; how long it took, and how much of the processors, child processes included."""
    begun, before = time.perf_counter(), sum(os.times()[:4])
    with screen.watch() as show:
        step.make(work, show)
    seconds = time.perf_counter() - begun
    screen.tell(f"      {seconds:.0f} s")
    return {"seconds": round(seconds, 1), "cpu_seconds": round(sum(os.times()[:4]) - before, 1)}


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
