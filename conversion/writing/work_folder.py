"""The working directory of a conversion: locked by one process at a time, removed when it is empty."""

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
    """Return the working directory of a target: on the same disk, and with the same path in every run."""
    return target / SUFFIX if is_fixed(target) else target.parent / f".{target.name}{SUFFIX}"


def is_fixed(folder: Path) -> bool:
    """True if a folder must be filled in place: it is a mount point, or its parent is not writable."""
    return folder.is_dir() and (os.path.ismount(folder) or not os.access(folder.parent, os.W_OK | os.X_OK))


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def move(path: Path, target: Path) -> None:
    """Move a file or a folder to `target` and replace what is there; an interrupted move can be repeated.

    A move to another disk copies to a temporary name first.
    """
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    try:
        os.replace(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        draft = target.with_name(f".{target.name}.partial")
        if os.path.lexists(draft):
            remove(draft)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, draft)
        os.replace(draft, target)
        remove(path)


@contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Create the missing parent folders of `path`; at the end, remove those that are still empty."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):  # not empty
            for parent in missing:
                if parent.exists():
                    parent.rmdir()


@contextmanager
def locked(work: Path, target: Path) -> Iterator[None]:
    """Create and lock the working directory; at the end, remove it if it contains only the lock."""
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
        except OSError:
            with suppress(OSError):  # another run may write there
                lock.parent.rmdir()
            raise
        try:
            lock_file(descriptor, lock.parent)
        except BlockingIOError:
            os.close(descriptor)
            raise ConversionError(f"another run is writing {target}: wait for it to end, or stop it") from None
        with suppress(FileNotFoundError):  # another run may have removed the file before it was locked
            if os.path.samestat(lock.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)
