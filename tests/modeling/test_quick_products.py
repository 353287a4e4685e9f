"""Products of matrices, by whichever library."""

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from crosshead.modeling import explicit_decode, quick_products
from crosshead.modeling.explicit_decode import Components, attend_to_components
from crosshead.modeling.quick_products import MULTIPLIES, is_quicker, product, round_part, round_whole
from tiers import first


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is the faster one."""
    if not MULTIPLIES:
        pytest.skip("oneDNN does not multiply here")
    monkeypatch.setattr(quick_products, "_has_kernels", lambda: True)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products were left to `functional.linear`."""
    made: list[int] = []
    linear = functional.linear

    def counting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made.append(len(x))
        return linear(x, weight)

    monkeypatch.setattr(quick_products.functional, "linear", counting)
    return made


def made(draw: random.Random, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix, which may lie by columns, or with gaps between its rows."""
    kind = draw.choice(("rows", "columns", "gaps"))
    if kind == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    return torch.randn(rows, columns + 3 * (kind == "gaps"), dtype=dtype)[:, :columns]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("shapes", first([50, 300]))
@torch.no_grad()
def test_random_shapes(dtype: torch.dtype, shapes: int) -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(shapes):
        many, few, shared = (draw.choice((1, 2, 7, draw.randint(1, most))) for most in (300, 40, 130))
        x, weight = made(draw, many, shared, dtype), made(draw, few, shared, dtype)
        found, exact = product(x, weight), x.double() @ weight.double().t()
        assert found.dtype == dtype and found.shape == (many, few)
        torch.testing.assert_close(found, exact.to(dtype), rtol=1e-4, atol=1e-4 if dtype != torch.bfloat16 else 1e-1)


@pytest.mark.usefixtures("_quick")
@torch.no_grad()
def test_what_one_dnn_has_kernels_for(by_torch: list[int]) -> None:
    x, weight = torch.randn(48, 8), torch.randn(3, 8)
    for y in (weight, weight.t().contiguous().t()):
        product(x, y)
    assert by_torch == []
    gaps: Any = torch.randn(48, 9)[:, :8], torch.randn(3, 9)[:, :8]
    for pair in ((gaps[0], weight), (x, gaps[1]), (x.bfloat16(), weight.bfloat16()), (x.double(), weight.double())):
        product(*pair)
    assert by_torch == [48] * 4


@pytest.mark.usefixtures("_quick")
@torch.no_grad()
def test_only_round_sizes_get_a_kernel(by_torch: list[int]) -> None:
    """What is left of the rows goes to torch, or all where the other sizes are not round."""
    round_columns = ((50, 3, 8, 2), (1000, 16, 8, 40), (9, 1, 1, 0))
    others = ((48, 17, 8, 48), (48, 3, 17, 48), (9, 0, 3, 9), (9, 3, 0, 9), (0, 3, 8, 0))
    for rows, columns, shared, left in (*round_columns, *others):
        x, weight = torch.randn(rows, shared), torch.randn(columns, shared)
        torch.testing.assert_close(product(x, weight), (x.double() @ weight.double().t()).float())
        assert by_torch == ([left] if left or not rows else [])
        by_torch.clear()


def test_round_sizes() -> None:
    """Eight to an octave, each near."""
    for size in range(1, 5000):
        part, whole = round_part(size), round_whole(size)
        assert size * 8 / 9 < part <= size <= whole < size * 9 / 8
        assert part == round_part(part) == round_whole(part) and whole == round_part(whole) == round_whole(whole)
    assert [len({round_part(size) for size in range(least, 2 * least)}) for least in (4, 8, 64, 4096)] == [4, 8, 8, 8]
    assert round_part(0) == round_whole(0) == 0


@pytest.mark.usefixtures("_quick")
@torch.no_grad()
def test_decoded_lengths_share_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape takes memory for good, and a text that grows has every length."""
    shapes = set()
    multiply = torch.ops.mkldnn._linear_pointwise

    def noting(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.add((x.shape, weight.shape))
        return multiply(x, weight, *rest)

    monkeypatch.setattr(explicit_decode, "LARGER", 0)
    monkeypatch.setattr(quick_products, "_is_quicker", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noting)
    for length in range(128, 256):
        side = Components(torch.randn(1, 2, length, 8), torch.randn(4, 2))
        attend_to_components(torch.randn(1, 4, 1, 8), side, side, None, None)
    assert len(shapes) == 2 * 8


def test_gradients(by_torch: list[int]) -> None:
    """As torch has them."""
    x, weight = torch.randn(50, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    given = torch.randn(50, 3)
    found = torch.autograd.grad(product(x, weight), (x, weight), given)
    torch.testing.assert_close(found, (given @ weight, given.t() @ x))
    assert by_torch == [50]


@torch.no_grad()
def test_without_one_dnn(by_torch: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for multiplies, capability in ((False, "AVX512"), (True, "DEFAULT")):
        quick_products._has_kernels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(quick_products, "MULTIPLIES", multiplies)
            patch.setattr("torch.backends.cpu.get_cpu_capability", lambda capability=capability: capability)
            product(torch.randn(50, 8), torch.randn(3, 8))
    quick_products._has_kernels.cache_clear()
    assert by_torch == [50, 50]


def test_where_one_dnn_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, quicker in (("AVX512", MULTIPLIES), ("AVX2", False), ("DEFAULT", False)):
        for known in (quick_products._has_kernels, quick_products._is_quicker):
            known.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr("torch.backends.cpu.get_cpu_capability", lambda capability=capability: capability)
            assert is_quicker(torch.randn(2, 2)) == quicker
            assert not is_quicker(torch.randn(2, 2).double())
    for known in (quick_products._has_kernels, quick_products._is_quicker):
        known.cache_clear()
