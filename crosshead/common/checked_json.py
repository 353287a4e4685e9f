"""Reads JSON from untrusted files; every error is one line that names the file."""

import json
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from .errors import ConversionError, one_line
from .file_bytes import open_regular_file, read_at

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 100
_LONGEST = 120
"""Maximum characters of a file's content in an error message."""


def quoted(value: Any) -> str:
    """A value from a file as text for an error message: quoted and shortened, without line breaks."""
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def read_object(path: Path, largest: int, kind: str) -> dict[str, Any]:
    """The JSON object in a file of at most `largest` bytes; `kind` names the kind of file in the error message."""
    with open_regular_file(path) as (descriptor, status):
        if status.st_size > largest:
            raise ConversionError(f"{path} has {status.st_size} bytes, too many for {kind}: fetch it again")
        raw = read_at(descriptor, path, 0, status.st_size)
    return parse_object(raw, str(path))


def parse_object(raw: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `raw`, which `source` names in errors; repeated keys, NaN and infinity are errors."""
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError as error:
        raise ConversionError(f"{source} is nested too deeply to be read: fetch the file again") from error
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits, or raised by the two hooks
        raise ConversionError(
            f"{source} is not usable JSON ({one_line(error)[:_LONGEST]}): fetch the file again"
        ) from error
    if not isinstance(content, dict):
        raise ConversionError(f"{source} holds {quoted(content)} instead of a JSON object: fetch the file again")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {quoted(twice)} is repeated")
    return content


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
