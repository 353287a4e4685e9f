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
QUERY = re.compile(r"\?[\w.%*-]{1,100}=\S*?(?=['\"),.;:>`]{0,3}(?:\s|$))")
"""Matches the query of a URL, which may contain a signature, up to the punctuation that follows the URL."""
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
    """The message of an exception on one line, without credentials and queries of URLs.

    It begins with the type if that is BARE or there is no message.
    """
    message = QUERY.sub("", CREDENTIALS.sub(r"\1", " ".join(str(error).split())))
    return f"{type(error).__name__} {message}".strip() if isinstance(error, BARE) or not message else message


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
