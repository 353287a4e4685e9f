"""The check for GPUs in random_calls.py, run in Triton's interpreter: it passes right kernels and finds wrong ones."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` runs these tests with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is off: `make test-triton` runs these tests with it", allow_module_level=True)

import triton.language as tl

import random_calls
from crosshead.modeling.kernels import routed_decode_triton, routed_triton, talking_triton, triton_backends
from random_calls import MAKERS, TOLERANCES, check

pytestmark = pytest.mark.slow

KERNELS = (
    (routed_triton, "attend_selected"),
    (routed_decode_triton, "decode_selected"),
    (talking_triton, "attend_in_tiles"),
)
MECHANISMS = ("mixture", "mixture-token", "talking")


def scaled_kernel(
    kernel: Callable[..., torch.Tensor], name: str, names: list[str], factor: float
) -> Callable[..., torch.Tensor]:
    """The kernel with its output multiplied by `factor`; each call appends `name` to `names`."""

    def called(*call: Any) -> torch.Tensor:
        names.append(name)
        return kernel(*call) * factor

    return called


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels as on a GPU. The interpreter computes with NumPy, which cannot multiply bfloat16."""
    for module, _ in KERNELS:
        monkeypatch.setitem(module.OPERAND_DTYPES, torch.bfloat16, tl.float32)
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    monkeypatch.setattr(random_calls, "uses_triton", lambda x: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("factor", (1.0, 1.03))
def test_check_passes_correct_kernels_and_fails_scaled_ones(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, scaled_kernel(getattr(module, name), name, names, factor))
    cases = [(mechanism, dtype) for mechanism in MAKERS for dtype in TOLERANCES]
    failed = {case for case in cases if not check(*case, "cpu", 24, 4)[1]}
    assert failed == (set() if factor == 1 else {case for case in cases if case[0] in MECHANISMS})
    assert set(names) == {name for _, name in KERNELS}
