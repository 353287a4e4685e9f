"""What an option of a mechanism may be: parsed when a config is made, refused with the option, the value, the allowed.

`parse` returns the value in the form a config stores (plain JSON types); `at` picks the value of one layer.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from sys import float_info
from typing import Any, Protocol


class Option(Protocol):
    """One option of one mechanism."""

    def parse(self, name: str, value: Any, layers: int) -> Any:
        """Check a value from a config for a model of `layers` layers; None stands for "not given"."""

    def at(self, value: Any, layer: int) -> Any:
        """The value in one layer."""


def refuse(name: str, value: Any, allowed: str) -> ValueError:
    """The error every option raises."""
    return ValueError(f"{name}={value!r} is not allowed: {allowed}")


def unknown(name: str, kind: str, given: Any, allowed: list[str]) -> ValueError:
    """The error for a name that does not exist, with the nearest one that does."""
    near = get_close_matches(given, allowed, n=1) if isinstance(given, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"{name} has no {kind} {given!r}: {hint}allowed are {', '.join(map(repr, allowed))}")


def is_whole(value: Any) -> bool:
    """An int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


class SameEverywhere:
    """An option with one value for all layers."""

    def at(self, value: Any, layer: int) -> Any:
        """The value itself."""
        return value


@dataclass(frozen=True)
class Choice(SameEverywhere):
    """One of several words, the first by default."""

    allowed: tuple[str, ...]

    def parse(self, name: str, value: Any, layers: int) -> str:
        """The word."""
        if value is None:
            return self.allowed[0]
        if not isinstance(value, str) or value not in self.allowed:
            raise refuse(name, value, f"use one of {', '.join(map(repr, self.allowed))}")
        return value


@dataclass(frozen=True)
class Subset(SameEverywhere):
    """A list of words, each at most once; all of them by default."""

    allowed: tuple[str, ...]
    default: tuple[str, ...] | None = None
    may_be_empty: bool = False

    def parse(self, name: str, value: Any, layers: int) -> list[str]:
        """The words, in the order given."""
        if value is None:
            return list(self.allowed if self.default is None else self.default)
        words = f"a list of any of {', '.join(map(repr, self.allowed))}"
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise refuse(name, value, f"use {words}")
        for word in value:
            if word not in self.allowed:
                raise refuse(name, value, f"{word!r} is unknown, use {words}")
        if len(set(value)) < len(value):
            raise refuse(name, value, f"a word stands twice, use {words}")
        if not value and not self.may_be_empty:
            raise refuse(name, value, f"it may not be empty, use {words}")
        return list(value)


@dataclass(frozen=True)
class Flag(SameEverywhere):
    """True or false."""

    default: bool

    def parse(self, name: str, value: Any, layers: int) -> bool:
        """The flag."""
        if value is None:
            return self.default
        if not isinstance(value, bool):
            raise refuse(name, value, "use true or false")
        return value


@dataclass(frozen=True)
class Number(SameEverywhere):
    """A number that is zero or more."""

    default: float

    def parse(self, name: str, value: Any, layers: int) -> float:
        """The number."""
        if value is None:
            return self.default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= float_info.max:
            raise refuse(name, value, "use a number from 0 up")
        return float(value)


@dataclass(frozen=True)
class Integer(SameEverywhere):
    """A whole number from 1 up; not given by default."""

    def parse(self, name: str, value: Any, layers: int) -> int | None:
        """The number."""
        if value is not None and not (is_whole(value) and value >= 1):
            raise refuse(name, value, "use a whole number from 1 up")
        return value


@dataclass(frozen=True)
class Count:
    """A number of heads, for all layers or as a list with one number per layer of the model."""

    minimum: int = 1
    required: bool = False

    def parse(self, name: str, value: Any, layers: int) -> int | list[int] | None:
        """The number or the list."""
        if value is None and not self.required:
            return None
        allowed = f"a whole number from {self.minimum} up, or a list of {layers} of them, one per layer of the model"
        if value is None:
            raise ValueError(f"{name} is missing: use {allowed}")
        counts = list(value) if isinstance(value, list | tuple) else [value]
        if not all(is_whole(count) and count >= self.minimum for count in counts):
            raise refuse(name, value, f"use {allowed}")
        if isinstance(value, list | tuple):
            if len(counts) != layers:
                raise refuse(name, value, f"it has {len(counts)} numbers, use {allowed}")
            return counts
        return value

    def at(self, value: Any, layer: int) -> int | None:
        """The layer's number."""
        return value[layer] if isinstance(value, list) else value


@dataclass(frozen=True)
class Layers(SameEverywhere):
    """The layers a mechanism works in; all by default."""

    def parse(self, name: str, value: Any, layers: int) -> list[int] | None:
        """The layer indices in ascending order."""
        if value is None:
            return None
        allowed = f"use a list of different layer indices from 0 to {layers - 1}, or leave it out for all layers"
        if not isinstance(value, list | tuple | range) or not value or not all(is_whole(index) for index in value):
            raise refuse(name, value, allowed)
        if len(set(value)) < len(value) or not all(0 <= index < layers for index in value):
            raise refuse(name, value, allowed)
        return sorted(value)
