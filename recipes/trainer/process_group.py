"""Coordination of several processes that share one disk."""

import gc
import traceback
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
    """Leave the group of processes at the end, also after a failure, so that none of its threads outlives the block.

    A thread of gloo takes Python's lock to let go of a tensor. If it does so while the interpreter ends, the process
    aborts (SIGABRT, "terminate called without an active exception"), whatever its exit status was to be. The threads
    end with the last reference to the group. A trainer holds one in its model, and is part of a reference cycle.
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
    """Let go of the local variables that an error and those before it keep alive, as a trainer may be one of them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
