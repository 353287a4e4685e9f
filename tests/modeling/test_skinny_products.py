"""Products of a matrix with few rows, by whichever library."""

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from crosshead.modeling import skinny_products
from crosshead.modeling.skinny_products import product


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products were left to `functional.linear`."""
    made: list[int] = []
    linear = functional.linear

    def counting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made.append(len(x))
        return linear(x, weight)

    monkeypatch.setattr(skinny_products.functional, "linear", counting)
    return made


def made(draw: random.Random, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix, which may lie by columns, or with gaps between its rows."""
    kind = draw.choice(("rows", "columns", "gaps"))
    if kind == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    return torch.randn(rows, columns + 3 * (kind == "gaps"), dtype=dtype)[:, :columns]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@torch.no_grad()
def test_random_shapes(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(300):
        many, few, shared = (draw.choice((1, 2, 7, draw.randint(1, most))) for most in (300, 40, 130))
        x, weight = made(draw, many, shared, dtype), made(draw, few, shared, dtype)
        found, exact = product(x, weight), x.double() @ weight.double().t()
        assert found.dtype == dtype and found.shape == (many, few)
        torch.testing.assert_close(found, exact.to(dtype), rtol=1e-4, atol=1e-4 if dtype != torch.bfloat16 else 1e-1)


@pytest.mark.skipif(not skinny_products._has_kernels(), reason="oneDNN has no kernels for this processor")
@torch.no_grad()
def test_what_one_dnn_has_kernels_for(by_torch: list[int]) -> None:
    x, weight = torch.randn(50, 8), torch.randn(3, 8)
    for y in (weight, weight.t().contiguous().t()):
        product(x, y)
    assert by_torch == []
    gaps: Any = torch.randn(50, 9)[:, :8], torch.randn(3, 9)[:, :8]
    for pair in ((gaps[0], weight), (x, gaps[1]), (x.bfloat16(), weight.bfloat16()), (x.double(), weight.double())):
        product(*pair)
    assert len(by_torch) == 4


def test_gradients(by_torch: list[int]) -> None:
    """As torch has them."""
    x, weight = torch.randn(50, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    given = torch.randn(50, 3)
    found = torch.autograd.grad(product(x, weight), (x, weight), given)
    torch.testing.assert_close(found, (given @ weight, given.t() @ x))
    assert by_torch == [50]


@torch.no_grad()
def test_without_one_dnn(by_torch: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("mkldnn.is_available", False), ("cpu.get_cpu_capability", "DEFAULT")):
        skinny_products._has_kernels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.backends.{name}", lambda value=value: value)
            product(torch.randn(50, 8), torch.randn(3, 8))
    skinny_products._has_kernels.cache_clear()
    assert by_torch == [50, 50]
