"""Records losses during a run, counts spikes, and ends a run whose loss diverged."""

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from crosshead.common.errors import DivergedError, RecipeError

from .checkpoints import METRICS

RECENT = 50
"""Steps that a loss is compared with."""
SPIKE, LEAST_SPIKE = 4.0, 0.1
"""A spike lies so many standard deviations, and so many nats, above the mean of recent steps."""
RUNAWAY, LEAST_RUNAWAY, PATIENCE = 2.0, 1.0, 20
"""A run is lost when the loss has been so many times its lowest mean, and so many nats above it, for so many steps.

The first mean is the first loss: a run may be lost from its beginning."""


class LossWatch:
    """Counts spikes, and ends a run that is lost."""

    def __init__(self, other_after: int = 0) -> None:
        """After that step the loss is another one."""
        self.spikes = self.sound = 0
        """How many; and the last step at which the loss was neither too high nor no number."""
        self._other_after = other_after
        self._forget()

    @property
    def above(self) -> bool:
        """The loss is so high that the run is lost if it stays there."""
        return self._above > 0

    def _forget(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lowest = float("inf")
        self._above = 0

    def see(self, losses: Sequence[float], first_step: int) -> None:
        """The losses of steps that follow each other."""
        for step, loss in enumerate(losses, first_step):
            if step == self._other_after + 1:
                self._forget()
            check_finite("loss", loss, step)
            if self._recent:
                self._compare(loss, step)
            self._recent.append(loss)
            if not self._above:
                self.sound = step

    def _compare(self, loss: float, step: int) -> None:
        usual = mean(self._recent)
        self._lowest = min(self._lowest, usual)
        if len(self._recent) >= RECENT // 2:
            self.spikes += loss - usual > max(SPIKE * pstdev(self._recent), LEAST_SPIKE)
        lost = loss > max(RUNAWAY * self._lowest, self._lowest + LEAST_RUNAWAY)
        self._above = self._above + 1 if lost else 0
        if self._above >= PATIENCE:
            raise DivergedError(
                f"the loss has run away: {loss:.2f} at step {step}, and {self._lowest:.2f} before: start again with a "
                "lower train.learning_rate"
            )


def check_finite(name: str, value: float, step: int) -> None:
    """`DivergedError` where there is nothing left to train."""
    if not isfinite(value):
        raise DivergedError(f"the {name} is {value} at step {step}: start again with a lower train.learning_rate")


class MetricsFile:
    """`metrics.jsonl`: a line per log, complete as soon as it is written."""

    def __init__(self, output: Path, step: int) -> None:
        """Goes on behind `step`; what a run that was killed later has written goes."""
        self._path = output / METRICS
        kept = [line for line in self.lines(output) if line["step"] <= step]
        temporary = self._path.with_suffix(".partial")
        with self._telling():
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            temporary.replace(self._path)

    def write(self, line: dict[str, Any]) -> None:
        """Add one."""
        with self._telling(), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())  # as checkpoints are

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecipeError(
                f"{self._path} cannot be written: {error.strerror}; checkpoints are as they were, and the same "
                "command goes on from them"
            ) from None

    @staticmethod
    def lines(output: Path) -> list[dict[str, Any]]:
        """What is there, as far as it is whole: the last line may have been cut short."""
        path, found = output / METRICS, []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                content = json.loads(line)
            except ValueError:
                break
            if not isinstance(content, dict) or not isinstance(content.get("step"), int):
                break
            found.append(content)
        return found

    @classmethod
    def last(cls, output: Path) -> dict[str, Any]:
        """The last value of each metric."""
        found: dict[str, Any] = {}
        for line in cls.lines(output):
            found |= line
        return {name: value for name, value in found.items() if name != "losses"}

    @classmethod
    def losses(cls, output: Path, steps: int) -> list[float]:
        """Of the first so many steps."""
        return [loss for line in cls.lines(output) for loss in line.get("losses", ())][:steps]
