"""Errors that a user sees as one line: the message names the wrong thing, its value, and what to do."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

BARE = (LookupError, ArithmeticError, AttributeError)
"""Exceptions whose message is only a name or a number."""


CREDENTIALS = re.compile(r"(\b\w+://)[^/@\s]+@")
"""A user's name and password in a URL, behind its scheme."""


class ConversionError(ValueError):
    """A checkpoint cannot be converted."""


class RecipeError(ValueError):
    """A recipe or its data cannot be used."""


class DivergedError(RecipeError):
    """The loss of a run diverged."""


class EvalError(ValueError):
    """A model cannot be evaluated."""


class CardError(ValueError):
    """A card cannot be written; the folder is unchanged."""


class FolderError(ValueError):
    """A folder cannot be published."""


def one_line(error: BaseException) -> str:
    """An exception's message on one line, with the exception's type where the message alone says too little."""
    message = CREDENTIALS.sub(r"\1", " ".join(str(error).split()))
    return f"{type(error).__name__} {message}".strip() if isinstance(error, BARE) or not message else message


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names nearest to an unknown one, as the end of a message."""
    close = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
