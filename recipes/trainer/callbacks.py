"""Trainer callbacks: stop on a signal, report progress, and apply the recipe's intervals after resuming."""

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
"""Seconds in which a repeated signal counts as the same request: launchers forward signals that the processes also
received themselves."""


class StopOnSignal(TrainerCallback):
    """Stops the run on Ctrl-C or SIGTERM, with a checkpoint, after the current step or evaluation batch.

    All processes stop at the same step. A second signal, more than `SAME_REQUEST` seconds after the first, has the
    effect that it would have without this callback.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """Number of the signal that this or another process received."""
        self._received_at: float | None = None
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block; has no effect outside the main thread, where Python forbids handlers."""
        with suppress(ValueError):  # raised outside the main thread
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
            # None: installed by C code, and Python cannot install it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save a checkpoint and stop if any process received a signal."""
        if self._is_requested(args, state):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # an evaluation may take long

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop during an evaluation, whose result is dropped, if any process received a signal."""
        control.should_training_stop |= self._is_requested(args, state)

    def _is_requested(self, args: Any, state: Any) -> bool:
        """Whether any process received a signal and steps remain; a collective operation."""
        number = _maximum(self.signal or 0, args)
        if number:  # otherwise a signal may have arrived during the reduction: it is reduced next time
            self.signal = number
        return bool(number) and state.global_step < state.max_steps


def _maximum(number: int, args: Any) -> int:
    """Return the maximum of a number over all processes."""
    if args.world_size == 1:
        return number
    maximum = torch.tensor(number, device=args.device)
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX)
    return int(maximum)


class ReportProgress(TrainerCallback):
    """Reports progress at each step, with the last logged loss and the mean speed, without the evaluations."""

    def __init__(self, progress: Progress, per_step: int, unit: str = "tokens") -> None:
        self._progress, self._per_step, self._unit = progress, per_step, unit
        self._message = ""
        self._start: tuple[float, int] | None = None
        self._reported = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the start time at the first step of this process."""
        if self._start is None:
            self._start = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Update and report the message with a new training or held-out loss."""
        if self._start is not None and logs and "eval_loss" in logs:  # an evaluation began after the last report
            start, first = self._start
            self._start = start + time.perf_counter() - self._reported, first
        start, first = self._start or (0.0, 0)
        for name, label in (("loss", "loss"), ("eval_loss", "held-out loss")):
            if logs and name in logs:
                speed = (state.global_step - first) * self._per_step / max(time.perf_counter() - start, 1e-9)
                self._message = f"{label} {logs[name]:.4f}, {speed:,.0f} {self._unit}/s"
                self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report that a step is done, in the main process."""
        self._reported = time.perf_counter()
        if state.is_world_process_zero:
            self._progress("training", state.global_step, state.max_steps, self._message)


class ApplyIntervals(TrainerCallback):
    """Replaces the checkpoint's intervals of logging, evaluation and saving by the recipe's."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Recompute the intervals from the arguments, after the state of a checkpoint was loaded."""
        state.compute_steps(args, args.max_steps)
