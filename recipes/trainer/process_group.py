"""Coordination of the processes of a distributed run, which share a file system."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


def is_main_process() -> bool:
    """Whether this is the main process (rank 0), which writes the files of a run."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def main_process_first(work: Callable[[], Result]) -> Result:
    """Call `work` in the main process, then in the others; return its result when all processes are done."""
    from accelerate import PartialState

    processes = PartialState(cpu=not torch.accelerator.is_available())  # on CPUs, the default sees one process
    with processes.main_process_first():
        result = work()
    processes.wait_for_everyone()
    return result


@contextmanager
def closing_process_group() -> Iterator[None]:
    """Destroy the process group at the end of the block, also after an error, so that its threads end.

    A gloo thread takes the GIL to release a tensor. If it does so while the interpreter exits, the process aborts
    (SIGABRT, "terminate called without an active exception") and loses its exit status. The threads end with the last
    reference to the group, which a trainer's model holds as part of a reference cycle; hence the garbage collection.
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
    """Clear the frames of an error and its causes, whose local variables may include a trainer."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
