"""Attention of a few queries to a line of keys cut into parts: what it is of all of them at once."""

import math
import random

import pytest
import torch

from crosshead.modeling import attention_in_parts
from crosshead.modeling.attention_in_parts import attended_in_parts, takes
from tiers import first


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_in_parts, "LEAST_KEYS", 3)


def with_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: count)


@pytest.fixture
def heads_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Parts, and keys in each, of every call of the kernel."""
    seen: list[tuple[int, int]] = []
    attend = attention_in_parts.attend

    def noting(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor, **options: object) -> object:
        seen.append((key.shape[1], key.shape[2]))
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(attention_in_parts, "attend", noting)
    return seen


@pytest.mark.parametrize("shapes", first([50, 500]))
@torch.no_grad()
def test_random_shapes(shapes: int, monkeypatch: pytest.MonkeyPatch, heads_of_calls: list[tuple[int, int]]) -> None:
    """Of any number of threads, under masks of both kinds, from keys with gaps between them."""
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(shapes):
        with_threads(monkeypatch, draw.choice((1, 2, 3, 4, 7, 16)))
        batch, rows, length = draw.randint(1, 4), draw.randint(1, 40), draw.randint(1, 60)
        size = draw.choice((1, 8, 65))
        query, wide = torch.randn(batch, rows, size), torch.randn(2, batch, length, size + draw.choice((0, 3)))
        keys, values = wide[..., :size]
        seen = torch.rand(draw.choice((1, batch)), 1, 1, length) < draw.choice((0.1, 0.5, 0.9))
        seen[..., draw.randrange(length)] = True
        added = torch.randn(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
        mask = draw.choice((None, seen, added))
        assert takes(query, keys, values, mask)
        scores = query.double() @ keys.double().transpose(1, 2)
        if mask is not None:
            scores = scores.masked_fill(~seen[:, 0], -math.inf) + (added[:, 0] if mask is added else 0)
        torch.testing.assert_close(
            attended_in_parts(query, keys, values, mask).double(),
            scores.softmax(-1) @ values.double(),
            rtol=1e-4,
            atol=1e-5,
        )
    assert max(parts for parts, _ in heads_of_calls) == 16


@torch.no_grad()
def test_parts(monkeypatch: pytest.MonkeyPatch, heads_of_calls: list[tuple[int, int]]) -> None:
    """As many as leave no thread without one, of enough keys each; what is over is a part of its own."""
    for threads, batch, length, expected in (
        (1, 1, 20, [(1, 20)]),
        (2, 1, 20, [(2, 10)]),
        (2, 1, 21, [(2, 10), (1, 1)]),
        (2, 2, 21, [(1, 21)]),
        (3, 2, 20, [(2, 10)]),
        (16, 1, 20, [(6, 3), (1, 2)]),
        (16, 1, 2, [(1, 2)]),
    ):
        with_threads(monkeypatch, threads)
        heads_of_calls.clear()
        keys = torch.randn(batch, length, 4)
        attended_in_parts(torch.randn(batch, 2, 4), keys, keys, None)
        assert heads_of_calls == expected


@pytest.mark.parametrize("hidden", (0, 5, 12))
@torch.no_grad()
def test_a_part_of_which_nothing_is_seen(monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    """It counts for nothing; where that is all of them, outputs are finite."""
    with_threads(monkeypatch, 3)
    query, keys, values = torch.randn(1, 2, 4), torch.randn(1, 12, 4), torch.randn(1, 12, 4)
    mask = (torch.arange(12) >= hidden).view(1, 1, 1, 12)
    found = attended_in_parts(query, keys, values, mask)
    assert found.isfinite().all()
    if hidden < 12:
        weights = (query @ keys[:, hidden:].transpose(1, 2)).softmax(-1)
        torch.testing.assert_close(found, weights @ values[:, hidden:])


def test_what_the_kernel_does_not_take() -> None:
    x = torch.randn(2, 3, 4)
    assert not takes(x, x, x, None)  # gradients may be wanted
    with torch.no_grad():
        assert takes(x, x, x, None)
        assert not takes(x.bfloat16(), x.bfloat16(), x.bfloat16(), None)
        assert not takes(x, x, x[..., :2], None)
        assert not any(takes(*some, None) for some in ((x[..., ::2],) * 3, (x, x.mT.contiguous().mT, x)))
        assert not takes(x, x, x, torch.ones(2, 1, 3, 3, dtype=torch.bool))
        assert not takes(x, x, x, torch.ones(2, 3, 1, 3, dtype=torch.bool))
        assert not torch.func.vmap(lambda y: torch.tensor(takes(y, y, y, None)))(x[None]).any()
