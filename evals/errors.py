"""The error that a user sees as one line."""

from collections.abc import Iterable
from difflib import get_close_matches


class EvalError(ValueError):
    """A model cannot be scored as asked: the message names what is wrong, its value, and what to do."""


def one_line(error: BaseException) -> str:
    """What another package's exception says, without line breaks; its kind where it says nothing."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names that are most like one that is not, as the end of a message."""
    close = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
