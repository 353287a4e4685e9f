"""Reads YAML with every scalar as text, because YAML 1.1 reads the key `on` as true and `1e-5` as a string."""

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from .errors import one_line

NULL = ("", "null", "~")
"""Spellings of None."""
LARGEST = 100_000
"""Maximum number of values in a document, because nested anchors can expand a small file to any size."""
BOOLEANS = {"true": True, "false": False}
"""Spelling in lower case -> value."""


class _TextLoader(yaml.BaseLoader):  # type: ignore[misc]  # yaml has no types
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping; a repeated key is an error, where the base class would keep its last value."""
        keys = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                raise yaml.constructor.ConstructorError(None, None, f"repeated key {key.value!r}", key.start_mark)
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The document with all scalars as strings; `ValueError` with one line for invalid YAML and repeated keys."""
    try:
        return _unshared(yaml.load(text, Loader=_TextLoader), count(1))
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise ValueError(f"not YAML: {one_line(error)}") from None


def read_yaml(path: Path, name: str, error_type: type[ValueError]) -> Any:
    """`parse_yaml` on a file; raise `error_type`, whose message begins with `name`, if the file is not valid."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise error_type(f"{name} cannot be read: {reason}") from None
    except ValueError as error:
        raise error_type(f"{name} is {error}") from None


def _unshared(content: Any, number: Iterator[int]) -> Any:
    """A copy in which aliases of one anchor are separate objects; `number` counts the values."""
    if next(number) > LARGEST:
        raise yaml.YAMLError(f"more than {LARGEST:,} values, anchors resolved")
    if isinstance(content, dict):
        return {key: _unshared(value, number) for key, value in content.items()}
    return [_unshared(value, number) for value in content] if isinstance(content, list) else content


def typed(value: Any) -> Any:
    """Convert strings to the null, boolean or finite number that they spell, also inside mappings and lists."""
    if isinstance(value, dict):
        return {key: typed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [typed(part) for part in value]
    if not isinstance(value, str):
        return value
    if value.lower() in (*NULL, *BOOLEANS):
        return BOOLEANS.get(value.lower())
    for read in (int, float):
        try:
            number = read(value)
        except ValueError:
            continue
        return number if math.isfinite(number) else value
    return value
