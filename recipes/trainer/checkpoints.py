"""Atomic checkpoints, and the lock and fingerprint of a run's output folder.

    <output>/
      run.json           fingerprint: the settings that determine the losses of the run
      metrics.jsonl      one line per logged step
      checkpoint-<step>/ a complete checkpoint: written in .partial, listed in complete.json, synced, then renamed
      .partial/          files being written, or left by a killed process
      .lock              lock file, held by the running process
      model/             the trained model, at the end

A run resumes from the newest checkpoint whose files have the sizes that its complete.json lists.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from crosshead.common.errors import RecipeError, one_line, os_errors
from crosshead.common.file_bytes import byte_size
from crosshead.common.posix import lock_file

from .process_group import is_main_process

PREFIX = "checkpoint-"
PARTIAL = ".partial"
LOCK = ".lock"
LIST = "complete.json"
RUN, RUN_PARTIAL = "run.json", "run.partial"
MODEL = "model"
METRICS = "metrics.jsonl"
DATA, OTHER_DATA = "data", "on other data (a source, one of its files, or a key of the section data differs)"
"""Key of the data's fingerprint in `run.json`, and the text for different ones."""
WEIGHTS_OF = "weights of"
"""Prefix of the keys in `run.json` that identify the initial weights. Runs of earlier versions lack these keys."""

logger = logging.getLogger(__name__)


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the newest first."""
    paths = [path for path in output.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return [path for path in sorted(paths, key=step_of, reverse=True) if _is_complete(path)]


def step_of(checkpoint: Path) -> int:
    """Return the number of completed steps in a checkpoint, from the name of its folder."""
    return int(checkpoint.name.removeprefix(PREFIX))


def publish(partial: Path, output: Path, keep: int) -> None:
    """Move a written checkpoint to its final place, and remove all but the `keep` newest checkpoints."""
    files = (path for path in sorted(partial.rglob("*")) if path.is_file())
    sizes = {file.relative_to(partial).as_posix(): file.stat().st_size for file in files}
    (partial / LIST).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
    move_synced(partial, output / partial.name)
    prune(output, keep)


def prune(output: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints."""
    for old in checkpoints(output)[keep:]:
        (output / PARTIAL).mkdir(exist_ok=True)
        shutil.rmtree(old.rename(output / PARTIAL / old.name))


def move_synced(partial: Path, target: Path) -> None:
    """Sync a folder to disk and rename it to `target`; an existing target is removed after the rename."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    old = partial.with_name(f"{target.name}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to disk (fsync), so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writable(output: Path) -> AbstractContextManager[None]:
    """Convert an `OSError` inside the block to a `RecipeError` that names the output folder."""
    return os_errors(RecipeError, f"output={output} cannot be written")


@contextmanager
def locked_output(output: Path, label: str | None = None) -> Iterator[None]:
    """Create the output folder, and lock it against other runs until the block or the process ends.

    `label` names the output in the error of a folder that cannot be written.

    A new folder is removed again if an error occurs before anything but the lock and the fingerprint was written.
    """
    is_new = not output.exists()
    with os_errors(RecipeError, f"{label or f'output={output}'} cannot be written"):
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
            raise RecipeError(f"another process writes to {output}: wait for it, or choose another folder") from None
        try:
            yield
        except BaseException:
            written = {path.name for path in output.glob("*") if path.stat().st_size}
            if is_new and written <= {LOCK, RUN, RUN_PARTIAL}:  # failed before the training
                shutil.rmtree(output, ignore_errors=True)
            raise


@contextmanager
def writing(name: str, output: Path) -> Iterator[None]:
    """Remove partial files after an error inside the block, and convert it to a `RecipeError`.

    All types of exceptions are converted, since libraries raise many on a full disk. An interrupt gets a note.
    Only the main process removes files: another process may fail only because the main process has ended.
    """
    try:
        yield
    except BaseException as error:
        free = byte_size(shutil.disk_usage(output).free)
        if is_main_process():
            shutil.rmtree(output / PARTIAL, ignore_errors=True)
        newest = next(iter(checkpoints(output)), None)
        advice = f"resumes from {newest.name}, which is unchanged" if newest else "starts again"
        if not isinstance(error, Exception):
            error.add_note(f"the same command {advice}")
            raise
        reason = one_line(error) + ("" if is_main_process() else " (or the main process failed: see its message)")
        raise RecipeError(
            f"{name} could not be written to {output}, whose disk has {free} free: {reason}; the same command {advice}"
        ) from error


def claim_output(output: Path, run: Mapping[str, Any]) -> None:
    """Write the run's fingerprint; raise `RecipeError` if the folder has checkpoints or a model of another run."""
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
            difference = OTHER_DATA if name == DATA else f"with {name}={old!r}, but the recipe has {new!r}"
            raise RecipeError(
                f"{output} has a run {difference}: resume with the earlier recipe, choose another output, or remove "
                "the folder"
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
    """Warn about a damaged checkpoint, once per checkpoint."""
    logger.warning("%s is damaged: the checkpoint is skipped", checkpoint)
