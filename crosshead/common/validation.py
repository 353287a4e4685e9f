"""Formats an error of a pydantic model as one line with the key, its value and the allowed values."""

from collections.abc import Iterable

from pydantic import ValidationError

from .errors import nearest


def first_error_message(error: ValidationError, known: Iterable[str], prefix: str) -> str:
    """A message about the first error.

    `prefix` is the text before the key; it ends in `--` if keys are command-line options.
    `known` are the allowed keys.
    """
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    key, equals = ".".join(map(str, first["loc"][:1])), "="
    if prefix.endswith("--"):
        key, equals = key.replace("_", "-"), " "
    if first["type"] == "extra_forbidden":
        return f"{prefix}{key!r} is not an option{nearest(str(first['loc'][0]), known)}"
    value = first["input"]
    value = value if isinstance(value, int | float) else repr(value)
    return f"{prefix}{key}{equals}{value} is not allowed: {first['msg'][0].lower()}{first['msg'][1:]}"
