"""Atomic output of one file and its record: the target is replaced only after both are fully written.

Both are written into the working directory `.<name>.crosshead-partial` next to the target and moved at the end, the
record last. A run that fails leaves nothing. After a run that was killed, the next run for the target removes its
files; if the file was already moved, the next run moves the record as well.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosshead.common.errors import ConversionError

from .work_folder import locked, parents_of, remove, work_folder


@contextmanager
def atomic_file(target: Path, record: Path, magic: bytes, overwrite: bool) -> Iterator[tuple[Path, Path]]:
    """Yield the temporary paths of the file and its record. Only a target that begins with `magic` is overwritten."""
    target = Path(os.path.abspath(target))
    work = work_folder(target)
    paths = work / target.name, work / record.name
    moves = dict(zip(paths, (target, record), strict=True))
    try:
        with parents_of(target), locked(work, target):
            _settle(work, moves)
            check_file(target, magic, overwrite)
            try:
                yield paths
                check_file(target, magic, overwrite)
                for path, destination in moves.items():
                    path.replace(destination)
            finally:
                _settle(work, moves)
    except OSError as error:
        raise ConversionError(f"{target} cannot be written: {error}") from error


def _settle(work: Path, moves: dict[Path, Path]) -> None:
    """Finish an interrupted move, and remove all files but the lock from the working directory."""
    (file, _), (record, destination) = moves.items()
    if record.exists() and not file.exists():
        record.replace(destination)
    for path in work.iterdir():
        if path.name != "lock":
            remove(path)


def check_file(target: Path, magic: bytes, overwrite: bool) -> None:
    """Refuse to replace anything but, with `overwrite`, a file that begins with `magic`."""
    if not os.path.lexists(target):
        return
    if target.is_dir():
        raise ConversionError(f"{target} is a folder, but a file is written there: choose another name")
    if not overwrite:
        raise ConversionError(f"{target} is already there: choose another place, or replace it with --overwrite")
    if target.is_symlink() or not target.is_file() or _begin(target, len(magic)) != magic:
        raise ConversionError(
            f"{target} is a link or does not begin with {magic.decode()}: it is not overwritten, choose another place"
        )


def _begin(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
