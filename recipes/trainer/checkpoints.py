"""Atomic checkpoints, and the lock and identity of a run's folder.

    <output>/
      run.json           the settings that determine the losses of the run
      metrics.jsonl      a line per logged step
      checkpoint-<step>/ complete: written elsewhere, listed in complete.json, synced, then renamed
      .partial/          files in writing, or those of a killed process
      .lock              held by the run that writes here
      model/             the result, at the end

A run resumes from the newest checkpoint whose files have the sizes in its list.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from crosshead.common.errors import RecipeError, one_line
from crosshead.common.posix import lock_file

from .process_group import is_main_process

PREFIX = "checkpoint-"
PARTIAL = ".partial"
LOCK = ".lock"
LIST = "complete.json"
RUN, RUN_PARTIAL = "run.json", "run.partial"
MODEL = "model"
METRICS = "metrics.jsonl"
WEIGHTS_OF = "weights of"
"""Prefix of the keys in `run.json` that identify initial weights. Runs of earlier versions have no such keys."""

logger = logging.getLogger(__name__)


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest first."""
    found = [path for path in output.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return [path for path in sorted(found, key=step_of, reverse=True) if _is_complete(path)]


def step_of(checkpoint: Path) -> int:
    """The number of steps before a checkpoint."""
    return int(checkpoint.name.removeprefix(PREFIX))


def publish(partial: Path, output: Path, keep: int) -> None:
    """Make a written checkpoint complete, and remove the oldest."""
    files = (path for path in sorted(partial.rglob("*")) if path.is_file())
    sizes = {file.relative_to(partial).as_posix(): file.stat().st_size for file in files}
    (partial / LIST).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
    move_synced(partial, output / partial.name)
    for old in checkpoints(output)[keep:]:
        shutil.rmtree(old.rename(partial.parent / old.name))


def move_synced(partial: Path, target: Path) -> None:
    """Move a folder to its place, synced to the disk; a folder that is there is removed last."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    old = partial.with_name(f"{target.name}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file or folder to the disk, so that it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writable(output: Path) -> Iterator[None]:
    """`RecipeError` if the system does not allow to write to the folder."""
    try:
        yield
    except OSError as error:
        raise RecipeError(f"output={output} cannot be written: {error.strerror}") from None


@contextmanager
def locked_output(output: Path) -> Iterator[None]:
    """Create the folder, and lock it against other runs until the block or the process ends."""
    is_new = not output.exists()
    with writable(output):
        output.mkdir(parents=True, exist_ok=True)
        try:
            file = (output / LOCK).open("a")
        except OSError:
            if is_new:
                output.rmdir()
            raise
    with file:
        try:
            lock_file(file, output)
        except BlockingIOError:
            raise RecipeError(f"another process trains in {output}: wait for it, or choose another output") from None
        try:
            yield
        except BaseException:
            written = {path.name for path in output.iterdir() if path.stat().st_size}
            if is_new and written <= {LOCK, RUN, RUN_PARTIAL}:  # refused before the training
                shutil.rmtree(output)
            raise


@contextmanager
def writing(name: str, output: Path) -> Iterator[None]:
    """After an error, which becomes one line, remove partial files; libraries raise many types for a full disk."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(output / PARTIAL, ignore_errors=True)
        free, newest = shutil.disk_usage(output).free / 1e9, next(iter(checkpoints(output)), None)
        advice = f"resumes from {newest.name}, which is unchanged" if newest else "starts again"
        raise RecipeError(
            f"{name} could not be written to {output}, whose disk has {free:.3f} GB free: {one_line(error)}; the same "
            f"command {advice}"
        ) from error


def claim_output(output: Path, run: Mapping[str, Any]) -> None:
    """Record the run's fingerprint; `RecipeError` if the folder has checkpoints or the model of another run."""
    path, has_results = output / RUN, bool(checkpoints(output)) or (output / MODEL).exists()
    if not path.exists() and (has_results or any(output.glob(f"{PREFIX}*")) or (output / METRICS).exists()):
        raise RecipeError(f"{output} has a model or a run, but no {RUN} to identify it: choose another output")
    if not has_results:
        if is_main_process():
            temporary = output / RUN_PARTIAL
            temporary.write_text(json.dumps(run, indent=2), encoding="utf-8")
            temporary.replace(path)
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{path} is damaged ({error}): choose another output, or remove the folder") from None
    for name in before | dict(run):
        new = run.get(name)
        old = before.get(name, new if name.startswith(WEIGHTS_OF) else None)
        if old != new:
            raise RecipeError(
                f"{output} has a run with {name}={old!r}, but the recipe has {new!r}: resume with the earlier recipe, "
                "choose another output, or remove the folder"
            )


def _is_complete(checkpoint: Path) -> bool:
    try:
        sizes = json.loads((checkpoint / LIST).read_bytes())
        complete = all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        complete = False
    if not complete:
        _warn(checkpoint)
    return complete


@cache
def _warn(checkpoint: Path) -> None:
    """Once for each checkpoint."""
    logger.warning("%s is damaged: the checkpoint is skipped", checkpoint)
