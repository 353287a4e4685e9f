"""The text in one column of a table."""

from collections.abc import Iterable
from typing import Any

from .errors import RecipeError


def missing_column(place: str, column: str, present: Iterable[str]) -> RecipeError:
    """The error where a table does not have the column."""
    return RecipeError(f"{place} has no column {column!r}: choose among {', '.join(map(repr, present)) or 'none'}")


def checked_text(value: Any, column: str, place: str) -> str:
    """The text of a document, empty where there is none; `RecipeError` where it is something else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecipeError(f"{place} holds {value!r:.40} in {column!r}, which is no text: choose another column")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{place} holds half a character in {column!r} (a lone surrogate): take it out") from None
    return value
