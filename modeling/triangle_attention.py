"""Causal attention of chosen queries, those of all heads at once, by torch's kernel for CPUs.

Queries and the keys that they see make a triangle, which is taken apart: the later half of the queries meets all keys
up to the first of its tokens, and each half is taken apart likewise, until few queries are left to meet their last
keys under a mask. The kernel keeps scores in the nearest memory, and says by which logarithm of a sum it has
divided: by these the pieces of a query count.

The kernel wants as many queries of each head. A head that has fewer than another has some of them twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ROWS = 128
"""Queries of each head that are not taken apart. Fewer are slower in the kernel, more meet more keys in vain."""
GREATEST_PART = 1.2
"""Of the scores that are made where each head is done alone, by as small blocks. With more, that is sooner done."""
HIDDEN = -1e30
"""Added to the score of a key that is not seen: finite, as there are queries that see none of a piece's keys."""


@dataclass(frozen=True)
class Leaf:
    """Some queries of each head, by their places in the lists, and the first and the last of their tokens."""

    rows: slice
    first: int
    last: int


@dataclass(frozen=True)
class Piece:
    """Queries and keys that meet; where it is not whole, a query does not see what is behind its token."""

    rows: slice
    keys: slice
    whole: bool

    @property
    def scores(self) -> int:
        """Of one head."""
        return (self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start)


class Lists:
    """The chosen queries of some key/value heads: as many of each, (B, n, R), in the order of their tokens.

    A head for which there are none has the tokens of another in its list.
    """

    def __init__(self, chosen: torch.Tensor, causal: bool, keys: int) -> None:
        """From what is chosen (B, T, n, readers of a head)."""
        batch, length, heads, size = chosen.shape
        of_heads = chosen.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        place = of_heads.nonzero()[:, 1]
        counts = of_heads.sum(1)
        self.length, self.wanted = int(counts.max()), (counts > 0).view(batch, heads, 1)
        of = torch.where(counts > 0, torch.arange(len(counts)), counts.argmax())
        each = torch.arange(self.length) * counts[of].unsqueeze(1) // self.length
        found = place[(counts.cumsum(0) - counts)[of].unsqueeze(1) + each].view(batch, heads, self.length)
        self.tokens, self.queries = found // size, found % size + size * torch.arange(heads).unsqueeze(1)
        self.pieces = self._pieces() if causal else [Piece(slice(0, self.length), slice(0, keys), whole=True)]
        alone = int((place // size + 1).sum()) + len(counts) * ROWS * length // 2 if causal else len(place) * keys
        self.part = len(counts) * sum(piece.scores for piece in self.pieces) / alone
        """Of the scores that would be made of each head alone."""

    def _pieces(self) -> list[Piece]:
        bounds = [*range(0, self.length, ROWS), self.length]
        firsts = self.tokens[..., bounds[:-1]].amin((0, 1)).tolist()
        lasts = self.tokens[..., [bound - 1 for bound in bounds[1:]]].amax((0, 1)).tolist()
        rows = (slice(*both) for both in pairwise(bounds))
        return list(_apart([Leaf(*each) for each in zip(rows, firsts, lasts, strict=True)], 0))

    def rows(self, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of (B, H, T, d) as rows, and the lists' places among them (B, n, R), where the first of H is given."""
        dense = x if x.is_contiguous() or x.transpose(1, 2).is_contiguous() else x.contiguous()
        batch, features = len(x), x.shape[3]
        rows = dense.as_strided((dense.numel() // features, features), (features, 1))
        of_sequence, of_head, of_token = (stride // features for stride in dense.stride()[:3])
        start = torch.arange(batch).view(batch, 1, 1) * of_sequence
        return rows, start + (first + self.queries) * of_head + self.tokens * of_token


def _apart(leaves: Sequence[Leaf], met: int) -> Iterator[Piece]:
    """The pieces of some leaves, whose queries have met the keys before `met`."""
    if len(leaves) == 1:
        if leaves[0].last >= met:
            yield Piece(leaves[0].rows, slice(met, leaves[0].last + 1), whole=leaves[0].first == leaves[0].last)
        return
    earlier, later = leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]
    seen = 1 + min(leaf.first for leaf in later)
    yield from _apart(earlier, met)
    if seen > met:
        yield Piece(slice(later[0].rows.start, later[-1].rows.stop), slice(met, seen), whole=True)
    yield from _apart(later, seen)


def attended_together(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chosen: torch.Tensor,
    first: int,
    causal: bool,
    scaling: float,
    output: torch.Tensor,
) -> bool:
    """Whether the key/value heads from `first` on are chosen so alike that this pays; then it is done.

    Queries (B, H, T, d), keys and values (B, heads, S, d), chosen (B, T, H); into the output (B, T, H, d).
    """
    size = query.shape[1] // key.shape[1]
    some = chosen[:, :, first * size :]
    if key.shape[2] < query.shape[2] or not some.any():
        return False
    lists = Lists(some.unflatten(2, (-1, size)), causal, key.shape[2])
    if lists.part > GREATEST_PART:
        return False
    rows, places = lists.rows(query, first * size)
    taken = rows.index_select(0, places.flatten()).view(*places.shape, -1)
    found = _attended(taken, key[:, first:], value[:, first:], lists, scaling)
    rows, places = lists.rows(output.transpose(1, 2), first * size)
    if lists.wanted.all():
        rows.index_copy_(0, places.transpose(1, 2).flatten(), found.transpose(1, 2).flatten(0, 2))
    else:
        wanted = lists.wanted.expand_as(places)
        rows.index_copy_(0, places[wanted], found[wanted])
    return True


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lists: Lists, scaling: float
) -> torch.Tensor:
    """Outputs (B, n, R, d) of queries (B, n, R, d) to keys and values (B, n, S, d)."""
    batch, heads, length, size = query.shape
    output = query.new_empty(batch, length, heads, size).transpose(1, 2)  # as the kernel's lie
    logarithms = query.new_empty(query.shape[:3])
    for piece in lists.pieces:
        added = None if piece.whole else _added(lists.tokens[..., piece.rows], piece.keys, query.dtype)
        k, v = key[:, :, piece.keys], value[:, :, piece.keys]
        found, of_found = attend(query[:, :, piece.rows], k, v, attn_mask=added, scale=scaling)
        before, of_before = output[:, :, piece.rows], logarithms[:, :, piece.rows]
        if piece.keys.start == 0:
            before.copy_(found)
            of_before.copy_(of_found)
        else:
            before.lerp_(found, torch.sigmoid(of_found - of_before).unsqueeze(-1))
            of_before.copy_(torch.logaddexp(of_before, of_found))
    return output


def _added(tokens: torch.Tensor, keys: slice, dtype: torch.dtype) -> torch.Tensor:
    """What hides the keys behind each of the tokens (B, n, rows): (B, n, rows, keys)."""
    size = keys.stop - keys.start
    line = torch.zeros(2 * size, dtype=dtype)
    line[size:] = HIDDEN
    seen = tokens + 1 - keys.start
    return line.unfold(0, size, 1).index_select(0, (size - seen).flatten()).view(*seen.shape, size)
