"""File locks, and the check for a system that has them: models load on Windows, most commands need POSIX."""

import logging
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)


class UnsupportedSystemError(RuntimeError):
    """The operating system lacks what a command needs."""


def require_posix(task: str) -> None:
    """`UnsupportedSystemError` on a system such as Windows; `task` is the subject of its message."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UnsupportedSystemError(
            f"{task} needs Linux or macOS (this Python has no module fcntl): on Windows use WSL"
        ) from None


def lock_file(file: int | IO[Any], place: Path, wait: bool = False) -> bool:
    """Lock an open file until it is closed or its process ends, however it ends.

    `BlockingIOError` where another process holds the lock, unless `wait`. Returns False with a warning where the file
    system has no locks, as some network file systems.
    """
    require_posix(f"writing to {place}")
    import fcntl  # not at the top: Windows has no such module

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        logger.warning("%s cannot be locked (%s): let no other process write there", place, error.strerror)
        return False
    return True
