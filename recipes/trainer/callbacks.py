"""Callbacks of the Trainer: stop on a signal, report progress, and apply the recipe's intervals after resuming."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from crosshead.common.progress import Progress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST = 2.0
"""Seconds in which a repeated signal is the same request: launchers forward signals that all processes received."""


class StopOnSignal(TrainerCallback):
    """Stops on Ctrl-C or SIGTERM after the current step or evaluation batch, with a checkpoint.

    All processes stop at the same step. A second signal ends the process at once, as without this callback.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that was received, by this or another process."""
        self._received_at: float | None = None
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block; in the main thread only, as Python allows no other."""
        with suppress(ValueError):  # of another thread
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self.signal, self._received_at = number, now
        elif now - self._received_at > SAME_REQUEST:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if any process received a signal."""
        if self._is_requested(args, state):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # an evaluation may take long

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The same after a batch of an evaluation, whose result is dropped."""
        control.should_training_stop |= self._is_requested(args, state)

    def _is_requested(self, args: Any, state: Any) -> bool:
        """Whether any process received a signal, and steps remain."""
        found = _maximum(self.signal or 0, args)
        if found:  # otherwise a signal may have come during the reduction: it counts the next time
            self.signal = found
        return bool(found) and state.global_step < state.max_steps


def _maximum(number: int, args: Any) -> int:
    """The maximum of a number over all processes."""
    if args.world_size == 1:
        return number
    found = torch.tensor(number, device=args.device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found)


class ReportProgress(TrainerCallback):
    """Reports each step, with the last logged loss and the speed since the start."""

    def __init__(self, progress: Progress, per_step: int, unit: str = "tokens") -> None:
        self._progress, self._per_step, self._unit = progress, per_step, unit
        self._message = ""
        self._start: tuple[float, int] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The time of the first step of this process."""
        if self._start is None:
            self._start = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """A new loss."""
        start, first = self._start or (0.0, 0)
        for name, label in (("loss", "loss"), ("eval_loss", "held-out loss")):
            if logs and name in logs:
                speed = (state.global_step - first) * self._per_step / max(time.perf_counter() - start, 1e-9)
                self._message = f"{label} {logs[name]:.4f}, {speed:,.0f} {self._unit}/s"
                self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is done."""
        if state.is_world_process_zero:
            self._progress("training", state.global_step, state.max_steps, self._message)


class ApplyIntervals(TrainerCallback):
    """Replaces the intervals of logging, evaluation and saving in a checkpoint by those of the recipe."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compute them from the arguments."""
        state.compute_steps(args, args.max_steps)
