"""Checkpoints that are complete or not there.

    <output>/
      run.json           which run this is: what decides its losses
      metrics.jsonl      a line per logged step
      checkpoint-<step>/ complete: written beside it, listed in complete.json, forced to the disk, then renamed
      .partial/          what is being written, or what a killed process left
      .lock              held by the one run that writes here
      model/             the result, at the end

The newest checkpoint whose files are as long as its list says is the one that a run goes on from.
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

from crosshead.common.errors import RecipeError
from crosshead.common.posix import lock_file

PREFIX = "checkpoint-"
PARTIAL = ".partial"
LOCK = ".lock"
LIST = "complete.json"
RUN = "run.json"
MODEL = "model"
METRICS = "metrics.jsonl"

logger = logging.getLogger(__name__)


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest first."""
    found = [path for path in output.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return [path for path in sorted(found, key=step_of, reverse=True) if _is_complete(path)]


def step_of(checkpoint: Path) -> int:
    """How many steps a checkpoint has behind it."""
    return int(checkpoint.name.removeprefix(PREFIX))


def publish(partial: Path, output: Path, keep: int) -> None:
    """Make a checkpoint that is written complete, and let the oldest go."""
    sizes = {file.relative_to(partial).as_posix(): file.stat().st_size for file in _files(partial)}
    (partial / LIST).write_text(json.dumps(sizes, indent=2), encoding="utf-8")
    put(partial, output / partial.name)
    for old in checkpoints(output)[keep:]:
        shutil.rmtree(old.rename(partial.parent / old.name))


def put(partial: Path, target: Path) -> None:
    """Move a folder to its place, its content forced to the disk; what was there before goes last."""
    for path in (*partial.rglob("*"), partial):
        force(path)
    old = partial.with_name(f"{target.name}.old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    force(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Make the folder, and hold it against other runs; a process that ends, however it ends, lets go."""
    made = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / LOCK).open("a")
    except OSError as error:
        raise RecipeError(f"output={output} cannot be written: {error.strerror}") from None
    with file:
        try:
            lock_file(file, output)
        except BlockingIOError:
            raise RecipeError(f"another process trains in {output}: wait for it, or choose another output") from None
        try:
            yield
        except BaseException:
            written = {path.name for path in output.iterdir() if path.stat().st_size}
            if made and written <= {LOCK, RUN}:  # refused before it began
                shutil.rmtree(output)
            raise


def check_run(output: Path, run: Mapping[str, Any]) -> None:
    """Write down which run this is; `RecipeError` where the folder holds checkpoints or the model of another one."""
    path, holds = output / RUN, bool(checkpoints(output)) or (output / MODEL).exists()
    if not path.exists() and (holds or any(output.glob(f"{PREFIX}*")) or (output / METRICS).exists()):
        raise RecipeError(f"{output} holds a model or a run, but no {RUN} says of which run: choose another output")
    if not holds:
        temporary = path.with_suffix(".partial")
        temporary.write_text(json.dumps(run, indent=2), encoding="utf-8")
        temporary.replace(path)
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{path} is damaged ({error}): choose another output, or remove the folder") from None
    for name in before | dict(run):
        was, now = before.get(name), run.get(name)
        if was != now:
            raise RecipeError(
                f"{output} holds a run with {name}={was!r}, and now it is {now!r}: go on with the recipe as it was, "
                "choose another output, or remove the folder"
            )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def force(path: Path) -> None:
    """To the disk, whatever becomes of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_complete(checkpoint: Path) -> bool:
    try:
        sizes = json.loads((checkpoint / LIST).read_bytes())
        whole = all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        whole = False
    if not whole:
        _warn(checkpoint)
    return whole


@cache
def _warn(checkpoint: Path) -> None:
    """Once."""
    logger.warning("%s is damaged: it is passed over", checkpoint)
