"""Ctrl-C and SIGTERM end a run after the step that it is in, or in the middle of an evaluation, with a checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has come; a second one ends the process at once, as if nobody listened."""

    def __init__(self) -> None:
        self.signal: int | None = None

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
        self.signal = number
        self._give_back()

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
        self._request.signal = _greatest(self._request.signal or 0, args) or None
        return self._request.signal is not None and state.global_step < state.max_steps


def _greatest(number: int, args: Any) -> int:
    if args.world_size == 1:
        return number
    found = torch.tensor(number, device=args.device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found)
