"""A folder that one process at a time works in, and that leaves no trace where nothing was left in it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import ConversionError


@contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Make the folders above `path` that are missing; those that are empty in the end are taken away again."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for parent in missing:
                parent.rmdir()


@contextmanager
def locked(work: Path, target: Path) -> Iterator[None]:
    """Make and hold `work`, in which `target` is prepared; afterwards it is removed if only the lock is in it."""
    lock = work / "lock"
    descriptor = _lock(lock, target)
    try:
        yield
    finally:
        with suppress(OSError):
            if os.listdir(work) == [lock.name]:
                lock.unlink()
                work.rmdir()
        os.close(descriptor)


def _lock(lock: Path, target: Path) -> int:
    while True:
        with suppress(FileExistsError):
            lock.parent.mkdir()
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another run has just removed the folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise ConversionError(f"another run is writing {target}: wait for it to end, or stop it") from None
            raise
        if _is_open(lock, descriptor):
            return descriptor
        os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file, which another run may have removed meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
