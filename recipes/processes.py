"""Several processes that share one disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def together() -> Iterator[None]:
    """Part from the other processes at the end, also of a failure.

    Threads of a group that is still open abort the interpreter when it ends, whatever its exit status was to be.
    """
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
