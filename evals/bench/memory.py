"""Measures the peak memory of ours or the baseline: by torch's allocator on a GPU, in a child process on a CPU.

usage: python -P -m crosshead.evals.bench.memory JOB, a case and a side as JSON; writes the bytes to stdout

The child process reads its resident memory from the operating system. There, glibc returns freed memory at once;
otherwise a varying part of it would count.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from crosshead.common.child_process import STATUS, memory_status, run_child
from crosshead.common.errors import EvalError
from crosshead.common.posix import require_posix

from .case import MEMORY, Case, on_device

WARM_UP = {"tokens": 128}
"""Shape of a small run before the measurement, which loads libraries."""
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Environment of the child process: from this size on, glibc maps an allocation and unmaps it when it is freed."""
MemoryCounter = tuple[Callable[[], int], Callable[[], int]]
"""Two functions that return the bytes of this process: now, and at their peak."""


def peak_bytes(case: Case, ours: bool, device: str) -> int:
    """Return the peak memory of one side, minus the memory before."""
    if device == "cpu":
        return _peak_of_child(case, ours)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    with on_device(device):
        return added_bytes(case, ours, (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))


def added_bytes(case: Case, ours: bool, counter: MemoryCounter) -> int:
    """Return the peak memory of one side in this process, minus the memory before it was built.

    If `case.measured` is `MEMORY`, subtract the memory after it was built, which includes the inputs. When the
    measured run starts, the peak of `counter` must not exceed its present value.
    """
    replace(case, shape={**case.shape, **WARM_UP}).side(ours)()
    gc.collect()
    now, peak = counter
    before = now()
    run = case.side(ours)
    if case.measured == MEMORY:
        before = now()
    else:
        run()  # the first step allocates the optimiser's state
    run()
    return peak() - before


def _peak_of_child(case: Case, ours: bool) -> int:
    require_posix("measuring memory")
    job = {"module": case.make.__module__, "maker": case.make.__name__, "shape": dict(case.shape), "ours": ours}
    job |= {"measured": case.measured, "threads": torch.get_num_threads()}
    command = [sys.executable, "-P", "-m", __name__, json.dumps(job)]
    return int(run_child(command, f"{case.name}: its process", EvalError, os.environ | MALLOC_ENVIRONMENT))


def system_counter() -> MemoryCounter:
    """Return a counter of resident memory; without /proc, the operating system reports only its peak."""
    if STATUS.exists():
        return partial(memory_status, "VmRSS"), partial(memory_status, "VmHWM")
    import resource  # Windows has no such module

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    return peak, peak


def main(job: dict[str, Any]) -> int:
    """Return the peak memory of the side that a job describes."""
    torch.set_num_threads(job["threads"])
    make = getattr(import_module(job["module"]), job["maker"])
    return added_bytes(Case("", "", "", make, job["shape"], measured=job["measured"]), job["ours"], system_counter())


if __name__ == "__main__":
    sys.stdout.write(str(main(json.loads(sys.argv[1]))))
