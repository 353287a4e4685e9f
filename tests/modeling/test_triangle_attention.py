"""Queries of many heads taken apart together: every score that is wanted is made once, and few others."""

import random

import pytest
import torch

from crosshead.modeling import triangle_attention
from crosshead.modeling.triangle_attention import Lists, attended_together
from routed_cases import SCALING, lower, plain


def made_scores(lists: Lists) -> torch.Tensor:
    """How often each query of the lists met each key that it may see: (N, R, S)."""
    length = max(piece.keys.stop for piece in lists.pieces)
    times = torch.zeros(*lists.tokens.shape, length, dtype=torch.long)
    for piece in lists.pieces:
        keys = torch.arange(piece.keys.start, piece.keys.stop)
        tokens = lists.tokens[:, piece.rows].unsqueeze(-1)
        times[:, piece.rows, piece.keys] += 1 if piece.whole else (keys <= tokens).long()
    return times


@pytest.mark.parametrize("rows", (1, 2, 3, 128))
def test_every_pair_meets_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists hold all that is chosen, and nothing else."""
    monkeypatch.setattr(triangle_attention, "ROWS", rows)
    random.seed(rows)
    torch.manual_seed(rows)
    for _ in range(200):
        length, heads, size = random.randint(1, 40), random.randint(1, 4), random.choice((1, 3))
        chosen = torch.rand(heads, length * size) < torch.tensor(random.choices((0.1, 0.5, 1.0), k=heads)).unsqueeze(1)
        chosen[:, random.randrange(length * size)] = True
        lists = Lists(chosen, size, True, length)
        held = torch.zeros_like(chosen).scatter(1, lists.tokens * size + lists.readers, True)
        assert torch.equal(held, chosen)
        assert (lists.tokens.diff(dim=-1) >= 0).all()
        keys = torch.arange(max(piece.keys.stop for piece in lists.pieces))
        assert torch.equal(made_scores(lists), (keys <= lists.tokens.unsqueeze(-1)).long())


@pytest.mark.parametrize("rows", (8, 16, 64))
def test_little_is_made_to_be_hidden(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads that are chosen alike: each leaf's own triangle, and what lists differ by."""
    monkeypatch.setattr(triangle_attention, "ROWS", rows)
    lists = Lists(torch.ones(3, 1024, dtype=torch.bool), 1, True, 1024)
    made = sum(piece.scores for piece in lists.pieces)
    assert 1024 * 1024 / 2 < made < 1024 * (1024 + 2 * rows) / 2
    torch.manual_seed(0)
    some = torch.rand(12, 1024).argsort(0) < 4
    assert Lists(some, 1, True, 1024).part < 1.2
    some[0] = True
    assert Lists(some, 1, True, 1024).part > 1.5


@pytest.mark.parametrize("layout", ("heads first", "tokens first", "gaps"))
@pytest.mark.parametrize("alike", (False, True))
@pytest.mark.parametrize("first", (0, 1))
@torch.no_grad()
def test_layouts(layout: str, alike: bool, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, from the head on that is the first to be attended; the others' outputs stay as they are."""
    monkeypatch.setattr(triangle_attention, "ROWS", 4)
    monkeypatch.setattr(triangle_attention, "GREATEST_PART", 100.0)
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, 3, 30, 8, dtype=torch.float64)
    query = torch.randn(2, 6, 30, 8, dtype=torch.float64)
    if layout == "tokens first":
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "gaps":
        query = query.repeat_interleave(2, dim=3)[..., ::2]
    chosen = torch.rand(2, 30, 6) < 0.5
    if not alike:
        chosen[0, :, 2:4] = False  # nothing of one head of one sequence, little of another
        chosen[1, 9:, 4:] = False
    output = torch.full((2, 30, 6, 8), 7.0, dtype=torch.float64)
    left = attended_together(query, key, value, chosen, first, True, SCALING, output)
    expected_left = chosen.clone()
    expected_left[:, :, 2 * first :] = False
    if not alike:
        expected_left[1, :9, 4:] = chosen[1, :9, 4:]  # alone, and so left
    assert torch.equal(left, expected_left)
    done = chosen & ~left
    done[:, :, : 2 * first] = False
    expected = plain(query, key, value, done, lower((2, 30, 30)))
    expected[~done] = 7.0
    torch.testing.assert_close(output, expected)


@torch.no_grad()
def test_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """All, where there are fewer keys than queries, or heads are chosen as often but at other times."""
    monkeypatch.setattr(triangle_attention, "ROWS", 16)
    x, output = torch.randn(1, 4, 512, 8), torch.zeros(1, 512, 4, 8)
    chosen = torch.ones(1, 512, 4, dtype=torch.bool)
    arguments = 0, True, 1.0, output
    assert torch.equal(attended_together(x, x[:, :, :100], x[:, :, :100], chosen, *arguments), chosen)
    assert torch.equal(attended_together(x, x, x, chosen, 4, *arguments[1:]), chosen)
    chosen[:, :256, :2] = chosen[:, 256:, 2:] = False
    assert torch.equal(attended_together(x, x, x, chosen, *arguments), chosen)
    assert not output.any()
    chosen[:] = True
    assert not attended_together(x, x, x, chosen, *arguments).any() and output.all()
