"""Reports the progress of a run."""

import time
from typing import Any, Protocol

from transformers import TrainerCallback


class Progress(Protocol):
    """Told the stage, how much of it is done, how much there is if that is known, and what there is to say."""

    def __call__(self, stage: str, done: int, total: int | None, told: str = "") -> None:
        """Show it."""


def silent(stage: str, done: int, total: int | None, told: str = "") -> None:
    """For nobody."""


class TellSteps(TrainerCallback):
    """Steps as they are made, with the last logged loss and the speed since the start."""

    def __init__(self, progress: Progress, tokens_per_step: int) -> None:
        self._progress, self._tokens = progress, tokens_per_step
        self._told = ""
        self._begun: tuple[float, int] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock runs from the first step of this process on."""
        if self._begun is None:
            self._begun = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """A new loss."""
        begun, first = self._begun or (0.0, 0)
        for name, words in (("loss", "loss"), ("eval_loss", "held-out loss")):
            if logs and name in logs:
                speed = (state.global_step - first) * self._tokens / max(time.perf_counter() - begun, 1e-9)
                self._told = f"{words} {logs[name]:.4f}, {speed:,.0f} tokens/s"
                self._tell(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One more."""
        self._tell(state)

    def _tell(self, state: Any) -> None:
        if state.is_world_process_zero:
            self._progress("training", state.global_step, state.max_steps, self._told)
