"""Metrics of a run: metrics.jsonl, spike counting, and detection of divergence."""

import json
import os
from collections import deque
from collections.abc import Collection, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from crosshead.common.errors import DivergedError

from .checkpoints import METRICS, writing

RECENT = 50
"""Number of recent steps with which a loss is compared."""
SPIKE, MIN_SPIKE = 4.0, 0.1
"""A loss is a spike if it exceeds the mean of recent steps by this many standard deviations and this many nats."""
DIVERGENCE, MIN_DIVERGENCE, PATIENCE = 2.0, 1.0, 20
"""A run diverged if its loss is above `DIVERGENCE` times its lowest mean over recent steps, and more than
`MIN_DIVERGENCE` nats above it, for `PATIENCE` consecutive steps.

The first mean is the first loss, since a run may diverge from its beginning."""


class LossMonitor:
    """Counts loss spikes, and raises `DivergedError` if the loss diverged or is not finite."""

    def __init__(self, changes: Collection[int] = (), patience: int | None = None) -> None:
        """`changes` are the steps after which the training loss changes to another kind."""
        self.spikes = 0
        self.last_good = 0
        """Last step whose loss was finite and not high."""
        self._changes, self._patience = changes, patience or PATIENCE
        self._reset()

    @property
    def is_high(self) -> bool:
        """Whether the last loss is so high that the run counts as diverged if it stays there for some steps."""
        return self._high_steps > 0

    def _reset(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lowest = float("inf")
        self._high_steps = 0

    def update(self, losses: Sequence[float], first_step: int) -> None:
        """Process the losses of consecutive steps."""
        for step, loss in enumerate(losses, first_step):
            if step - 1 in self._changes:
                self._reset()
            check_finite("loss", loss, step)
            if self._recent:
                self._compare(loss, step)
            self._recent.append(loss)
            if not self.is_high:
                self.last_good = step

    def _compare(self, loss: float, step: int) -> None:
        recent_mean = mean(self._recent)
        self._lowest = min(self._lowest, recent_mean)
        if len(self._recent) >= RECENT // 2:
            self.spikes += loss - recent_mean > max(SPIKE * pstdev(self._recent), MIN_SPIKE)
        is_high = loss > max(DIVERGENCE * self._lowest, self._lowest + MIN_DIVERGENCE)
        self._high_steps = self._high_steps + 1 if is_high else 0
        if self._high_steps >= self._patience:
            raise DivergedError(
                f"the loss diverged: {loss:.2f} at step {step}, and {self._lowest:.2f} before: start again with a "
                "lower train.learning_rate"
            )


def check_finite(name: str, value: float, step: int) -> None:
    """Raise `DivergedError` if the value is nan or infinite."""
    if not isfinite(value):
        raise DivergedError(f"the {name} is {value} at step {step}: start again with a lower train.learning_rate")


class MetricsFile:
    """`metrics.jsonl`: one line per log call, synced to disk when it is written."""

    def __init__(self, output: Path, step: int) -> None:
        """Continue after `step`; remove later lines, which a killed run wrote after its last checkpoint."""
        self._path = output / METRICS
        lines = [line for line in self.lines(output) if line["step"] <= step]
        temporary = self._path.with_suffix(".partial")
        with writing(METRICS, output):
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            temporary.replace(self._path)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        with writing(METRICS, self._path.parent), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())  # checkpoints are synced too

    @staticmethod
    def lines(output: Path) -> list[dict[str, Any]]:
        """Return the valid lines before the first damaged one; a killed run may leave an incomplete last line."""
        path, lines = output / METRICS, []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                content = json.loads(line)
            except ValueError:
                break
            if not isinstance(content, dict) or not isinstance(content.get("step"), int):
                break
            lines.append(content)
        return lines

    @classmethod
    def last(cls, output: Path) -> dict[str, Any]:
        """Return the last value of each metric."""
        metrics: dict[str, Any] = {}
        for line in cls.lines(output):
            metrics |= line
        return {name: value for name, value in metrics.items() if name != "losses"}

    @classmethod
    def losses(cls, output: Path, steps: int) -> list[float]:
        """Return the losses of the first `steps` steps."""
        return [loss for line in cls.lines(output) for loss in line.get("losses", ())][:steps]
