"""Progress of long computations: the interface, a counter, and an implementation that shows nothing."""

from collections.abc import Callable
from typing import Protocol

Advance = Callable[[int, int], None]
"""Callback with the number of finished units and the total number of units."""


class Progress(Protocol):
    """Callback with the stage, the amount done, the total or None, and a message such as the last loss."""

    def __call__(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        """Show the progress."""


class Counter:
    """Counts the finished units of a stage and shows the progress."""

    def __init__(self, progress: Progress, stage: str, total: int | None) -> None:
        self._progress, self._stage, self._total, self._done = progress, stage, total, 0

    def add(self, units: int, message: str = "") -> None:
        """Add finished units, and show the progress with a message."""
        self.count(units)
        self.show(message)

    def count(self, units: int) -> None:
        """Add finished units."""
        self._done += units

    def show(self, message: str = "") -> None:
        """Show the progress with a message."""
        self._progress(self._stage, self._done, self._total, message)


def silent(stage: str, done: int, total: int | None, message: str = "") -> None:
    """A `Progress` that shows nothing."""
