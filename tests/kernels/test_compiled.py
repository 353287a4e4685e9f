"""Kernels compile for a GPU, without having one: the compiler is stricter than Triton's interpreter."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` runs these tests with it")

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
MOST_SHARED = 227 * 1024
"""Maximum bytes of shared memory per program on an H100."""
KERNELS = {
    "mixture": {"list_tokens", "attend", "query_gradients", "key_gradients", "_look"},
    "token": {"decode_split", "merge_splits"},
    "talking": {"softmax_stats", "weighted_values", "_look"},
}


def launched_kernels() -> Iterator[str]:
    """Names of the kernels launched in modeling/kernels, as in `name[grid](...)`."""
    for path in (TESTS.parent / "modeling" / "kernels").glob("*_triton.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Subscript) and isinstance(called.value, ast.Name):
                yield called.value.id


def test_kernel_list_contains_every_launched_kernel() -> None:
    assert set(launched_kernels()) == set.union(*KERNELS.values())


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_h100_and_fit_shared_memory(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", str(TESTS / "compile_kernels.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS[name]
    assert not [kernel for kernel in kernels if kernel["shared"] > MOST_SHARED or not kernel["binary"]]
