"""Text from a YAML file as the dataclasses of the schema: each value is typed by its field, an unknown key refused.

A dataclass checks in `__post_init__` what its types do not say, with a message that begins with the field's name.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from crosshead.modeling.options import refuse, unknown

NOTHING = ("", "null", "~")
LONGEST = 100
"""Characters of what is no recipe at all that a message shows."""
WORDS = {"true": True, "false": False}
Section = TypeVar("Section")


@dataclass(frozen=True)
class Range:
    """What a number may be, as part of its type."""

    low: float
    high: float = math.inf
    low_itself: bool = True
    high_itself: bool = True

    def check(self, name: str, value: float) -> None:
        """`ValueError` where the value lies outside."""
        too_low = value < self.low or (value == self.low and not self.low_itself)
        if too_low or value > self.high or (value == self.high and not self.high_itself):
            low = f"{'from' if self.low_itself else 'above'} {self.low}"
            high = f" {'to' if self.high_itself else 'to below'} {self.high}"
            raise refuse(name, value, f"use a number {low}{'' if self.high == math.inf else high}")


LARGEST = 2**63 - 1
Count = Annotated[int, Range(1, LARGEST)]
Whole = Annotated[int, Range(0, LARGEST)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
Beta = Annotated[float, Range(0, 1, high_itself=False)]
Positive = Annotated[float, Range(0, low_itself=False)]
NotNegative = Annotated[float, Range(0)]


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _flag(text: str) -> bool:
    if text.lower() not in WORDS:
        raise ValueError(text)
    return WORDS[text.lower()]


def _some(text: str) -> str:
    if text in NOTHING:
        raise ValueError(text)
    return text


SCALARS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "use a whole number"),
    float: (_finite, "use a number"),
    bool: (_flag, "use true or false"),
    str: (_some, "use a word or a text"),
}
"""How the text of a plain value is read, and what is said where that fails."""


def read_section(section: type[Section], content: Any, name: str) -> Section:
    """A dataclass from a mapping of text; `name` is where it stands in the file, nothing for the whole of it."""
    if not isinstance(content, dict):
        said = content if len(str(content)) < LONGEST else f"{str(content)[:LONGEST]}..."
        raise refuse(name or "the recipe", said, "use a mapping, one `key: value` a line")
    kinds = get_type_hints(section, include_extras=True)
    for key in content:
        if key not in kinds:
            raise unknown(name or "the recipe", "key", key, list(kinds))
    for field in fields(section):  # type: ignore[arg-type]
        if field.name not in content and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name or 'the recipe'} lacks the key {field.name!r}, which has no default")
    prefix = f"{name}." if name else ""
    values = {key: read_value(kinds[key], value, f"{prefix}{key}") for key, value in content.items()}
    try:
        return section(**values)
    except ValueError as error:  # a section's own checks name its fields alone
        raise ValueError(f"{prefix}{error}") from None


def read_value(kind: Any, value: Any, name: str) -> Any:
    """One value of a field's type."""
    if is_dataclass(kind):
        return read_section(kind, {} if value == "" else value, name)  # type: ignore[arg-type]
    if kind in SCALARS:
        return _scalar(kind, value, name)
    arguments = get_args(kind)
    return READERS[get_origin(kind)](arguments, value, name)


def _scalar(kind: Any, value: Any, name: str) -> Any:
    read, allowed = SCALARS[kind]
    if not isinstance(value, str):
        raise refuse(name, value, allowed)
    try:
        return read(value)
    except ValueError:
        raise refuse(name, value, allowed) from None


def _ranged(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    number = read_value(arguments[0], value, name)
    arguments[1].check(name, number)
    return number


def _optional(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    kind = next(argument for argument in arguments if argument is not NoneType)
    return None if value in NOTHING else read_value(kind, value, name)


def _choice(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if value not in arguments:
        raise refuse(name, value, f"use one of {', '.join(map(repr, arguments))}")
    return value


def _list(arguments: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    many = arguments[-1] is Ellipsis
    if not isinstance(value, list) or not (many or len(value) == len(arguments)):
        raise refuse(name, value, "use a list" if many else f"use a list of {len(arguments)}, as in [a, b]")
    kinds = [arguments[0]] * len(value) if many else arguments
    return tuple(
        read_value(kind, part, f"{name}.{index}") for index, (kind, part) in enumerate(zip(kinds, value, strict=True))
    )


def _free(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise refuse(name, value, "use a mapping, one `key: value` a line")
    return plain(value)


READERS: dict[Any, Callable[[tuple[Any, ...], Any, str], Any]] = {
    Annotated: _ranged,
    Union: _optional,
    UnionType: _optional,
    Literal: _choice,
    tuple: _list,
    dict: _free,
}
"""How a value of a composed type is read."""


def plain(value: Any) -> Any:
    """Text without a type of its own as what it looks like: null, a flag, a number, else text; inside lists too."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if value in NOTHING or value.lower() in WORDS:
        return WORDS.get(value.lower())
    for read in (int, _finite):
        try:
            return read(value)
        except ValueError:
            continue
    return value
