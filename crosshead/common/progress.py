"""Progress of long work: the interface, and progress that nobody watches."""

from typing import Protocol


class Progress(Protocol):
    """Called with the stage, the amount done, the total if it is known, and a message such as the last loss."""

    def __call__(self, stage: str, done: int, total: int | None, message: str = "") -> None:
        """Show it."""


def silent(stage: str, done: int, total: int | None, message: str = "") -> None:
    """Show nothing."""
