"""Progress of long work: the interface, and progress that nobody watches."""

from typing import Protocol


class Progress(Protocol):
    """Shows how far a stage is: units done, units in all if that is known, and a message."""

    def __call__(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        """Show it."""


def silent(stage: str, done: int, total: int | None, message: str = "") -> None:
    """Show nothing."""
