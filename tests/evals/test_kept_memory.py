"""Memory that stays with a process."""

import os
import subprocess
import sys

import pytest

from crosshead.evals import kept_memory

FAULTS = """
import resource, sys
from crosshead.evals.kept_memory import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(20):
    before = faults()
    parts = [torch.ones(7 << 18) for _ in range(8)]
    del parts
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts these faults")
def test_what_is_freed_is_not_taken_from_the_system_again():
    """By the faults of the twentieth turn: 8 times 7 MB are 14,000 pages, where glibc gives them back."""
    gives_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}

    def faults(how):
        return int(subprocess.check_output([sys.executable, "-P", "-c", FAULTS, how], text=True, env=gives_back))

    assert faults("kept") < 100 < 10_000 < faults("not")


def test_a_c_library_without_the_setting(monkeypatch):
    monkeypatch.setattr(kept_memory.ctypes, "CDLL", lambda name: object())
    kept_memory.keep_memory()
