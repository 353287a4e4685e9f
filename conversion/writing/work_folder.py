"""A folder that one process at a time works in, and that leaves no trace where nothing was left in it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crosshead.common.errors import ConversionError
from crosshead.common.posix import lock_file

SUFFIX = ".crosshead-partial"


def work_folder(target: Path) -> Path:
    """Where to prepare a folder: on the disk that it will lie on, under a name that the next run finds."""
    return target / SUFFIX if is_fixed(target) else target.parent / f".{target.name}{SUFFIX}"


def is_fixed(folder: Path) -> bool:
    """Whether nothing can be prepared beside a folder: it is a mount point, or its parent cannot be written."""
    return folder.is_dir() and (os.path.ismount(folder) or not os.access(folder.parent, os.W_OK | os.X_OK))


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def move(path: Path, place: Path) -> None:
    """Move a file or a folder over what is there, also to another disk; if that is interrupted, it can be repeated."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    try:
        os.replace(path, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        draft = place.with_name(f".{place.name}.partial")
        if os.path.lexists(draft):
            remove(draft)
        if path.is_dir():
            shutil.copytree(path, draft)
        else:
            shutil.copyfile(path, draft)
        os.replace(draft, place)
        remove(path)


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
            lock_file(descriptor, lock.parent)
        except BlockingIOError:
            os.close(descriptor)
            raise ConversionError(f"another run is writing {target}: wait for it to end, or stop it") from None
        if _is_open(lock, descriptor):
            return descriptor
        os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file, which another run may have removed meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
