"""Queries of many heads taken apart together: every score that is wanted is made once, and few others."""

import random

import pytest
import torch

from crosshead.modeling import triangle_attention
from crosshead.modeling.triangle_attention import Lists, attended_together
from routed_cases import SCALING, lower, plain, routes


def made_scores(lists: Lists) -> torch.Tensor:
    """How often each query of the lists met each key that it may see: (B, n, R, S)."""
    length = max(piece.keys.stop for piece in lists.pieces)
    times = torch.zeros(*lists.tokens.shape, length, dtype=torch.long)
    for piece in lists.pieces:
        keys = torch.arange(piece.keys.start, piece.keys.stop)
        tokens = lists.tokens[..., piece.rows].unsqueeze(-1)
        times[..., piece.rows, piece.keys] += 1 if piece.whole else (keys <= tokens).long()
    return times


@pytest.mark.parametrize("rows", (1, 2, 3, 128))
def test_every_pair_meets_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists hold all that is chosen, and nothing else of a head that has any."""
    monkeypatch.setattr(triangle_attention, "ROWS", rows)
    random.seed(rows)
    torch.manual_seed(rows)
    for _ in range(200):
        batch, length, heads = random.randint(1, 3), random.randint(1, 40), random.randint(1, 4)
        size = random.choice((1, 3))
        chosen = routes((batch, length, length), heads * size).unflatten(2, (heads, size))
        if not chosen.any():
            continue
        lists = Lists(chosen, True, length)
        assert torch.equal(lists.wanted.squeeze(-1), chosen.any(1).any(-1))
        readers = lists.queries - size * torch.arange(heads).unsqueeze(1)
        held = torch.zeros_like(chosen)
        for sequence in range(batch):
            for head in range(heads):
                held[sequence, lists.tokens[sequence, head], head, readers[sequence, head]] = True
        kept = lists.wanted.view(batch, 1, heads, 1)
        assert torch.equal(held & kept, chosen)
        assert (lists.tokens.diff(dim=-1) >= 0).all()
        keys = torch.arange(max(piece.keys.stop for piece in lists.pieces))
        assert torch.equal(made_scores(lists), (keys <= lists.tokens.unsqueeze(-1)).long())


@pytest.mark.parametrize("rows", (8, 16, 64))
def test_little_is_made_to_be_hidden(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads that are chosen alike: each leaf's own triangle, and what lists differ by."""
    monkeypatch.setattr(triangle_attention, "ROWS", rows)
    lists = Lists(torch.ones(1, 1024, 3, 1, dtype=torch.bool), True, 1024)
    made = sum(piece.scores for piece in lists.pieces)
    assert 1024 * 1024 / 2 < made < 1024 * (1024 + 2 * rows) / 2
    torch.manual_seed(0)
    some = torch.rand(1, 1024, 12, 1).argsort(2) < 4
    assert Lists(some, True, 1024).part < 1.2
    unlike = some.clone()
    unlike[..., :1, :] = True
    assert Lists(unlike, True, 1024).part > 1.5


@pytest.mark.parametrize("layout", ("heads first", "tokens first", "gaps"))
@pytest.mark.parametrize("shared", (0, 1))
@torch.no_grad()
def test_layouts(layout: str, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    chosen = torch.rand(2, 30, 6) < 0.4
    chosen[:, :, 4:] = False
    output = torch.full((2, 30, 6, 8), 7.0, dtype=torch.float64)
    assert attended_together(query, key, value, chosen, shared, True, SCALING, output)
    expected = plain(query, key, value, chosen, lower((2, 30, 30)))
    expected[~chosen] = 7.0
    expected[:, :, : 2 * shared] = 7.0
    torch.testing.assert_close(output, expected)


@torch.no_grad()
def test_heads_that_are_chosen_unlike_are_left() -> None:
    """Nothing is written; nor where nothing is chosen, nor where there are fewer keys than queries."""
    x, output = torch.randn(1, 4, 512, 8), torch.zeros(1, 512, 4, 8)
    chosen = torch.zeros(1, 512, 4, dtype=torch.bool)
    arguments = chosen, 0, True, 1.0, output
    assert not attended_together(x, x, x, *arguments)
    chosen[:, :, 1] = True
    assert not attended_together(x, x, x, *arguments)
    chosen[:] = True
    assert not attended_together(x, x[:, :, :100], x[:, :, :100], *arguments)
    assert not output.any()
    assert attended_together(x, x, x, *arguments) and output.all()
