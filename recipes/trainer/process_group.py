"""Coordination of several processes that share one disk."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


def is_main_process() -> bool:
    """Whether this process writes the files of a run."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def main_process_first(work: Callable[[], Result]) -> Result:
    """Work of each process: the main process does it alone, then the others; all wait until it is done."""
    from accelerate import PartialState

    processes = PartialState(cpu=not torch.accelerator.is_available())  # the default misses the others on CPUs
    with processes.main_process_first():
        result = work()
    processes.wait_for_everyone()
    return result


@contextmanager
def closing_process_group() -> Iterator[None]:
    """Leave the process group at the end, also after an error, so that none of its threads outlives the block.

    A thread of gloo takes Python's lock to release a tensor. If it does so while the interpreter exits, the process
    aborts (SIGABRT, "terminate called without an active exception") and loses its exit status. The threads end with
    the last reference to the group, which a trainer holds in its model, as part of a reference cycle.
    """
    try:
        yield
    except BaseException as error:
        _clear_frames(error)
        raise
    finally:
        if torch.distributed.is_initialized():
            gc.collect()
            torch.distributed.destroy_process_group()


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables of an error and its causes, among which may be a trainer."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
