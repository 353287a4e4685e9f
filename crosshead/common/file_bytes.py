"""Reads byte ranges of files without mmap, because mapped pages would count as memory of this process.

Also formats a number of bytes.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConversionError

CHUNK = 1 << 20
"""Bytes per read: a multiple of every item size, small enough for the CPU cache."""
UNITS = ("KiB", "MiB", "GiB")


def byte_size(count: int) -> str:
    """A number of bytes in the largest unit in which it is at least 1."""
    power = min(len(UNITS), max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**power:,.2f} {UNITS[power - 1]}" if power else f"{count} bytes"


@contextmanager
def open_regular_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file; yield descriptor and status. An `OSError` in the block becomes a `ConversionError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would block
    except (OSError, ValueError) as error:
        raise ConversionError(_unreadable(path, error)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConversionError(f"{path} cannot be read: it is not a file")
        yield descriptor, status
    except OSError as error:
        raise ConversionError(_unreadable(path, error)) from error
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path} cannot be read: {reason}"


def fill(buffer: memoryview, descriptor: int, path: Path, start: int) -> None:
    """Fill the buffer with the bytes from offset `start`; `ConversionError` if the file ends before."""
    while buffer:
        count = os.preadv(descriptor, [buffer], start)
        if not count:
            raise ConversionError(
                f"{path} ended at byte {start} while it was read: do not change the source during a conversion"
            )
        buffer, start = buffer[count:], start + count


def read_at(descriptor: int, path: Path, start: int, count: int) -> bytes:
    """`count` bytes from offset `start`, in one piece."""
    raw = bytearray(count)
    fill(memoryview(raw), descriptor, path, start)
    return bytes(raw)


def chunks_at(path: Path, start: int, count: int) -> Iterator[memoryview]:
    """`count` bytes from offset `start`, in pieces of `CHUNK` bytes; the next piece overwrites the buffer."""
    buffer = memoryview(bytearray(CHUNK))
    with open_regular_file(path) as (descriptor, _):
        for offset in range(0, count, CHUNK):
            piece = buffer[: count - offset]
            fill(piece, descriptor, path, start + offset)
            yield piece
