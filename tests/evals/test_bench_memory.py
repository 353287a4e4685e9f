"""Memory benchmarks: the memory of one run, read from the system in a new process."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from crosshead.common.errors import EvalError
from crosshead.evals.bench.case import MEMORY, TOTAL_MEMORY, Case
from crosshead.evals.bench.cases import TALKING
from crosshead.evals.bench.memory import added_bytes, peak_bytes

pytestmark = pytest.mark.slow  # like all tests of measuring tools

EAGER = next(case for case in TALKING if case.name == "talking-forward-memory")


@pytest.mark.parametrize(("measured", "expected"), [(MEMORY, 30), (TOTAL_MEMORY, 1030)])
def test_added_bytes_of_memory_and_total_memory_cases(measured, expected):
    """A side holds 1000 bytes once it is made and a run takes 30 more; the smaller warm-up keeps 5."""
    held = {"now": 7, "peak": 7}

    def hold(more, keep):
        held["peak"] = max(held["peak"], held["now"] + more)
        held["now"] += more if keep else 0

    def make(ours, tokens):
        hold(5 if tokens == 128 else 1000, keep=True)
        return lambda: hold(2 if tokens == 128 else 30, keep=False)

    case = Case("a", "", "", make, {"tokens": 4096}, measured=measured)
    assert added_bytes(case, True, (lambda: held["now"], lambda: held["peak"])) == expected


@pytest.mark.distributed
def test_peak_memory_includes_attention_weights_of_eager_side_only():
    case = replace(EAGER, shape=EAGER.shape | {"tokens": 1024})
    ours, eager = (peak_bytes(case, side, "cpu") for side in (True, False))
    weights = 16 * 1024 * 1024 * 4
    assert eager > 2 * weights
    assert ours < weights / 2


@pytest.mark.distributed
def test_failing_side_raises_eval_error_with_the_case_name():
    case = replace(EAGER, shape=EAGER.shape | {"heads": -1})
    with pytest.raises(EvalError, match=r"talking-forward-memory\b.*\w+Error: .*-1"):
        peak_bytes(case, True, "cpu")


def test_interrupted_measurement_kills_the_child_process(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def communicate(self):
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        peak_bytes(EAGER, True, "cpu")
    assert started[0].returncode == -9
    job = json.loads(started[0].args[-1])
    assert (job["maker"], job["measured"], job["threads"]) == ("talking_layer", "memory", torch.get_num_threads())


COUNTS = """
import torch
from crosshead.evals.bench.memory import system_counter

now, peak = system_counter()
before = now()
held = torch.ones(30_000_000)
assert 0.9 < (now() - before) / (4 * len(held)) < 1.1
assert peak() >= now()
"""


def test_system_counter_sees_an_allocated_tensor():
    """In a new process: one that freed memory may reuse it, which adds nothing."""
    subprocess.run([sys.executable, "-P", "-c", COUNTS], check=True)
