"""Memory of one side of a case: by the allocator's count on a GPU, by the system's in a process of its own on a CPU.

usage: python -P -m crosshead.evals.bench.memory JOB, a case and a side as JSON; writes the bytes to stdout

There, glibc gives what is freed back to the system at once. Otherwise some of it would stay counted, more or less from
run to run.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import EvalError
from crosshead.common.posix import require_posix

from .case import MEMORY, Case

WARM_UP = {"tokens": 128}
"""The shape of the run before memory is read: libraries that load late are no part of a run."""
STATUS = Path("/proc/self/status")
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""To glibc: from so many bytes on, memory comes from the system and goes back to it."""


@dataclass(frozen=True)
class Counter:
    """Bytes of this process, now and at their peak."""

    now: Callable[[], int]
    peak: Callable[[], int]


def peak_bytes(case: Case, ours: bool, device: str) -> int:
    """Bytes that one side adds at its peak to what was held before it."""
    if device == "cpu":
        return _in_a_process(case, ours)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return added(case, ours, Counter(torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))


def added(case: Case, ours: bool, counter: Counter) -> int:
    """The same by a counter whose peak is no higher than what is held when the run begins, or grows with it."""
    replace(case, shape={**case.shape, **WARM_UP}).side(ours)()
    gc.collect()
    before = counter.now()
    run = case.side(ours)
    if case.measured == MEMORY:
        before = counter.now()
    else:
        run()  # the optimiser's own memory comes with the first step
    run()
    return counter.peak() - before


def _in_a_process(case: Case, ours: bool) -> int:
    require_posix("measuring memory")
    side = {"module": case.make.__module__, "maker": case.make.__name__, "shape": dict(case.shape), "ours": ours}
    job = json.dumps(side | {"measured": case.measured, "threads": torch.get_num_threads()})
    command = [sys.executable, "-P", "-m", __name__, job]
    # In a group of its own, so that Ctrl-C reaches this process alone, which then ends that one.
    pipe, environment = subprocess.PIPE, os.environ | GIVEN_BACK
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, process_group=0) as process:
        try:
            told, complaint = process.communicate()
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        reason = (complaint.decode(errors="replace").strip().splitlines() or ["out of memory?"])[-1]
        raise EvalError(f"{case.name}: its process ended with status {process.returncode}: {reason}")
    return int(told)


def _system_counter() -> Counter:
    """The system's count of resident memory; where it tells the peak alone, that grows with what is held."""
    if STATUS.exists():
        return Counter(lambda: _status("VmRSS"), lambda: _status("VmHWM"))
    import resource  # not at the top: Windows has no such module

    unit = 1 if sys.platform == "darwin" else 1024

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    return Counter(peak, peak)


def _status(name: str) -> int:
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(job: dict[str, Any]) -> int:
    """The bytes of the side that a job names."""
    torch.set_num_threads(job["threads"])
    maker = getattr(import_module(job["module"]), job["maker"])
    return added(Case("", "", "", maker, job["shape"], measured=job["measured"]), job["ours"], _system_counter())


if __name__ == "__main__":
    sys.stdout.write(str(main(json.loads(sys.argv[1]))))
