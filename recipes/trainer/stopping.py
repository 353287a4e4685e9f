"""Stops a run on Ctrl-C or SIGTERM after the current step or evaluation batch, with a checkpoint."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST = 2.0
"""Seconds in which a signal that comes again is the same request: a launcher passes on what all have got."""


class StopRequest:
    """Whether a signal has come; one that comes again later ends the process at once, as if nobody listened."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since: float | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals, in the main thread alone, and give them back at the end."""
        try:
            before: dict[int, Any] = {number: signal.signal(number, self._received) for number in SIGNALS}
        except ValueError:  # another thread's training is stopped by whoever started it
            yield
            return
        self._before = before
        try:
            yield
        finally:
            self._give_back()

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self.signal, self._since = number, now
        elif now - self._since > SAME_REQUEST:
            self._give_back()
            os.kill(os.getpid(), number)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StopWhenAsked(TrainerCallback):
    """Saves and stops; where there are several processes, all at the same step."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if any process has been asked to."""
        if self._asked(args, state):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # whoever asks may not wait long

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The same behind a batch of an evaluation, which then says nothing."""
        control.should_training_stop |= self._asked(args, state)

    def _asked(self, args: Any, state: Any) -> bool:
        """Any process, before the last step is done."""
        found = _greatest(self._request.signal or 0, args)
        if found:  # if not, one may have come while this process waited for the others: it counts the next time
            self._request.signal = found
        return bool(found) and state.global_step < state.max_steps


def _greatest(number: int, args: Any) -> int:
    if args.world_size == 1:
        return number
    found = torch.tensor(number, device=args.device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found)
