"""File locks, and the check for a POSIX system: models load on Windows, but most commands need file locks."""

import logging
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)


class UnsupportedSystemError(RuntimeError):
    """The operating system lacks a function that the command needs."""


def require_posix(task: str) -> None:
    """Raise `UnsupportedSystemError` on systems such as Windows; `task` is the subject of its message."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UnsupportedSystemError(
            f"{task} needs Linux or macOS (this Python has no module fcntl): on Windows use WSL"
        ) from None


def lock_file(file: int | IO[Any], path: Path, wait: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends; `path` names it in messages.

    `BlockingIOError` if another process holds the lock; with `wait`, block until it is free. Some network file systems
    have no locks: then log a warning and return False.
    """
    require_posix(f"writing to {path}")
    import fcntl  # not at the top: Windows has no such module

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        logger.warning("%s cannot be locked (%s): let no other process write there", path, error.strerror)
        return False
    return True
