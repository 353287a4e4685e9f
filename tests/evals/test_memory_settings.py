"""`keep_memory` keeps freed memory in the process and lets tensors use large pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crosshead.evals.bench import machine as kept_memory

pytestmark = pytest.mark.slow  # like all tests of measuring tools

FAULTS = """
import resource, sys
from crosshead.evals.bench.machine import keep_memory
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
def test_keep_memory_avoids_page_faults_on_reallocation():
    """Page faults of the twentieth turn: 8 tensors of 7 MB are 14,000 pages, if glibc returns them to the system."""
    gives_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}

    def faults(how):
        return int(subprocess.check_output([sys.executable, "-P", "-c", FAULTS, how], text=True, env=gives_back))

    assert faults("kept") < 100 < 10_000 < faults("not")


def test_keep_memory_without_mallopt_in_the_c_library(monkeypatch):
    values = []
    monkeypatch.setattr(kept_memory.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(kept_memory.torch, "empty", lambda size: values.append(os.environ[kept_memory.LARGE_PAGES]))
    kept_memory.keep_memory()
    assert values == ["1"]


LARGE = """
import os
from crosshead.evals.bench.cases import ATTENTION
from crosshead.evals.bench.machine import LARGE_PAGES, keep_memory
before = os.environ.get(LARGE_PAGES)
keep_memory()
assert os.environ.get(LARGE_PAGES) == before
import torch
tensor = torch.ones(2**24)
(line,) = (line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))
print(line.split()[1])
"""
PAGES, COUNTED = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/self/smaps_rollup")
HAS_THEM = PAGES.exists() and COUNTED.exists() and "[never]" not in PAGES.read_text()


@pytest.mark.skipif(not HAS_THEM, reason="the system has no large pages")
@pytest.mark.parametrize("setting", [None, "0"])
def test_tensors_use_large_pages(setting):
    """Large pages are used even if all benchmarks are imported first; their number depends on the system."""
    environment = {key: value for key, value in os.environ.items() if key != kept_memory.LARGE_PAGES}
    environment |= {} if setting is None else {kept_memory.LARGE_PAGES: setting}
    kilobytes = subprocess.check_output([sys.executable, "-P", "-c", LARGE], text=True, env=environment)
    assert int(kilobytes) > 0
