"""Errors that a user sees as one line: the message names the faulty input, its value, and the remedy."""

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

BARE = (LookupError, ArithmeticError, AttributeError)
"""Exceptions whose message is often only a name or a number."""
CREDENTIALS = re.compile(r"(\b\w+://)[^/@\s]+@")
"""Matches user name and password after the scheme of a URL."""
QUERY = re.compile(r"(\bhttps?://[^\s?]+)\?[^\s'\")]+")
"""Matches a URL with a query, which may contain a signature."""
FULL_DISK = ("No space left on device", "Disk quota exceeded")
"""Parts of the messages of the operating system, also inside those of libraries."""


class ConversionError(ValueError):
    """A checkpoint cannot be converted."""


class RecipeError(ValueError):
    """A recipe or its data cannot be used."""


class DivergedError(RecipeError):
    """The loss of a run diverged."""


class EvalError(ValueError):
    """A model cannot be evaluated."""


class CardError(ValueError):
    """A model card cannot be written; the folder is unchanged."""


class FolderError(ValueError):
    """A model folder cannot be published."""


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, without credentials; with its type if it is BARE or has no message."""
    message = without_secrets(str(error))
    return f"{type(error).__name__} {message}".strip() if isinstance(error, BARE) or not message else message


def without_secrets(message: str) -> str:
    """The message on one line, without credentials and queries in URLs."""
    return QUERY.sub(r"\1", CREDENTIALS.sub(r"\1", " ".join(message.split())))


@contextmanager
def os_errors(error_type: type[ValueError], message: str) -> Iterator[None]:
    """Convert an `OSError` inside the block to an `error_type`: the message, followed by the reason."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{message}: {error.strerror or one_line(error)}") from error


@contextmanager
def temporary_files() -> Iterator[None]:
    """Convert the error of a full disk to a `ConversionError`; the block writes only below `tempfile.gettempdir()`."""
    try:
        yield
    except Exception as error:
        if not any(text in str(error) for text in FULL_DISK):
            raise
        raise ConversionError(
            f"the disk of the temporary folder {tempfile.gettempdir()} is full: free some space, or name another "
            "folder in TMPDIR"
        ) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the known names most similar to an unknown one, to append to a message; empty if none is close."""
    close = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
