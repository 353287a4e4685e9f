"""Kinds of options of mechanisms; each kind checks values when a config is made.

Errors quote the option, the value and the allowed values. Values are stored as plain JSON types.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


def refuse(name: str, value: Any, allowed: str) -> ValueError:
    """Return the error for a value that is not allowed."""
    return ValueError(f"{name}={value!r} is not allowed: {allowed}")


def unknown(name: str, kind: str, value: Any, allowed: list[str]) -> ValueError:
    """Return the error for an unknown name, with the most similar known name as a hint."""
    matches = get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return ValueError(f"{name} has no {kind} {value!r}: {hint}allowed are {', '.join(map(repr, allowed))}")


def is_whole(value: Any) -> bool:
    """Whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


class Option:
    """One option of one mechanism; unless a subclass says otherwise, one value holds for all layers."""

    default: Any = None

    def parse(self, name: str, value: Any, layers: int) -> Any:
        """Return the checked value for a model of `layers` layers. None means that the option is absent."""
        return self.default if value is None else self.check(name, value, layers)

    def check(self, name: str, value: Any, layers: int) -> Any:
        """Return the value as a config stores it; raise `ValueError` if it is not allowed."""
        raise NotImplementedError

    def at(self, value: Any, layer: int) -> Any:
        """Return the value for one layer."""
        return value


@dataclass(frozen=True)
class Choice(Option):
    """One of several words; the first is the default."""

    allowed: tuple[str, ...]

    @property
    def default(self) -> str:
        """The first allowed word."""
        return self.allowed[0]

    def check(self, name: str, value: Any, layers: int) -> str:
        """Return the word if it is allowed."""
        if not isinstance(value, str) or value not in self.allowed:
            raise refuse(name, value, f"use one of {', '.join(map(repr, self.allowed))}")
        return value


@dataclass(frozen=True)
class Subset(Option):
    """A list of allowed words, each at most once."""

    allowed: tuple[str, ...]
    default: tuple[str, ...]
    may_be_empty: bool = False

    def parse(self, name: str, value: Any, layers: int) -> list[str]:
        """Return the list of words in the given order, or the default."""
        words = list(self.default if value is None else value if isinstance(value, list | tuple) else [None])
        distinct = all(isinstance(word, str) for word in words) and len(set(words)) == len(words)
        if not distinct or not set(words) <= set(self.allowed) or not (words or self.may_be_empty):
            raise refuse(name, value, f"use a list of any of {', '.join(map(repr, self.allowed))}, each once")
        return words


@dataclass(frozen=True)
class Flag(Option):
    """True or false; if the default is None, the option may be absent."""

    default: bool | None

    def check(self, name: str, value: Any, layers: int) -> bool:
        """Return the value if it is a bool."""
        if not isinstance(value, bool):
            raise refuse(name, value, "use true or false")
        return value


@dataclass(frozen=True)
class Number(Option):
    """A number from 0 up."""

    default: float

    def check(self, name: str, value: Any, layers: int) -> float:
        """Return the value as a float if it is a number from 0 up."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e300:
            raise refuse(name, value, "use a number from 0 up")
        return float(value)


@dataclass(frozen=True)
class Integer(Option):
    """A whole number from 1 up; if the default is None, the option may be absent."""

    default: int | None = None

    def check(self, name: str, value: Any, layers: int) -> int:
        """Return the value if it is a whole number from 1 up."""
        if not (is_whole(value) and value >= 1):
            raise refuse(name, value, "use a whole number from 1 up")
        return int(value)


@dataclass(frozen=True)
class Count(Option):
    """A number of heads: one for all layers, or a list with one number per layer of the model."""

    minimum: int = 1
    required: bool = False

    def parse(self, name: str, value: Any, layers: int) -> int | list[int] | None:
        """Return the checked number or list of numbers; None if absent and not required."""
        if value is None and not self.required:
            return None
        listed = isinstance(value, list | tuple)
        counts = list(value) if listed else [value]
        if not all(is_whole(count) and count >= self.minimum for count in counts) or (
            listed and len(counts) != layers
        ):
            number = f"a whole number from {self.minimum} up"
            raise refuse(name, value, f"use {number}, or a list of {layers} of them, one for each layer of the model")
        return counts if listed else counts[0]

    def at(self, value: Any, layer: int) -> int | None:
        """Return the number of heads for one layer."""
        return value[layer] if isinstance(value, list) else value


class Layers(Option):
    """Indices of the layers that have the mechanism; all layers if absent."""

    def check(self, name: str, value: Any, layers: int) -> list[int]:
        """Return the layer indices in ascending order."""
        indices = list(value) if isinstance(value, list | tuple | range) else []
        in_range = all(is_whole(index) and 0 <= index < layers for index in indices)
        if not indices or not in_range or len(set(indices)) < len(indices):
            allowed = f"use a list of different layer indices from 0 to {layers - 1}, or leave it out for all layers"
            raise refuse(name, value, allowed)
        return sorted(indices)
