"""Several processes that share one disk."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def in_turn(work: Callable[[], Result]) -> Result:
    """What each process does: the first one alone, then the others; none goes on before all are done."""
    from accelerate import PartialState

    processes = PartialState(cpu=not torch.accelerator.is_available())  # it would miss the others of a CPU run
    with processes.main_process_first():
        result = work()
    processes.wait_for_everyone()
    return result
