"""Causal attention of chosen queries, those of many heads at once, by torch's kernel for CPUs.

Queries and the keys that they see make a triangle, which is taken apart: the later half of the queries meets all keys
up to the first of its tokens, and each half is taken apart likewise, until few queries are left to meet their last
keys under a mask. The kernel keeps scores in the nearest memory, and says by which logarithm of a sum it has
divided: by these the pieces of a query count.

The kernel wants as many queries of each head. So heads of which about as many are chosen go together, and those that
have fewer than another have some of them twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ROWS = 128
"""Queries of each reader of a head that are not taken apart: with more, more keys are met in vain."""
LEAST_OF_MOST = 0.8
"""Chosen queries of a head, for one of the head with the most, where both are chosen alike."""
LEAST_READERS = 3
"""Of heads that are chosen alike, together."""
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
    """The chosen queries of N key/value heads: as many of each, (N, R), in the order of their tokens."""

    def __init__(self, chosen: torch.Tensor, size: int, causal: bool, keys: int) -> None:
        """From what is chosen (N, T * size) of the queries of `size` readers of a head; something, of each head."""
        place, counts = chosen.nonzero()[:, 1], chosen.sum(1)
        self.length = int(counts.max())
        each = torch.arange(self.length) * counts.unsqueeze(1) // self.length
        found = place[(counts.cumsum(0) - counts).unsqueeze(1) + each]
        self.tokens, self.readers = found // size, found % size
        if causal:
            self.pieces = self._pieces(ROWS * size)
            alone = int((place // size + 1).sum()) + len(counts) * ROWS * chosen.shape[1] // 2
        else:
            self.pieces = [Piece(slice(0, self.length), slice(0, keys), whole=True)]
            alone = len(place) * keys
        self.part = len(counts) * sum(piece.scores for piece in self.pieces) / alone
        """Of the scores that would be made of each head alone."""

    def _pieces(self, size: int) -> list[Piece]:
        bounds = [*range(0, self.length, size), self.length]
        firsts = self.tokens[:, bounds[:-1]].amin(0).tolist()
        lasts = self.tokens[:, [bound - 1 for bound in bounds[1:]]].amax(0).tolist()
        rows = (slice(*both) for both in pairwise(bounds))
        return list(_apart([Leaf(*each) for each in zip(rows, firsts, lasts, strict=True)], 0))

    def rows(self, x: torch.Tensor, sequence: torch.Tensor, reader: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All of (B, H, T, d) as rows, and where the lists' queries are among them (N, R).

        For each of the N heads, its sequence and its first reader are given.
        """
        dense = x if x.is_contiguous() or x.transpose(1, 2).is_contiguous() else x.contiguous()
        features = x.shape[3]
        rows = dense.as_strided((dense.numel() // features, features), (features, 1))
        of_sequence, of_head, of_token = (stride // features for stride in dense.stride()[:3])
        start = sequence * of_sequence + reader * of_head
        return rows, start.unsqueeze(1) + self.readers * of_head + self.tokens * of_token


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
) -> torch.Tensor:
    """Write the outputs of key/value heads that are chosen alike, of the first one given on, and say what is left.

    Queries (B, H, T, d), keys and values (B, heads, S, d), output (B, T, H, d); chosen, and what is left, (B, T, H).
    """
    batch, heads, size = len(key), key.shape[1] - first, query.shape[1] // key.shape[1]
    if key.shape[2] < query.shape[2] or heads == 0:
        return chosen
    by_head = chosen[:, :, first * size :].unflatten(2, (heads, size)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    left = by_head.any(1)
    for members in _alike(by_head.sum(1).tolist(), -(-LEAST_READERS // size)):
        lists = Lists(by_head[members], size, causal, key.shape[2])
        if lists.part > GREATEST_PART:
            continue
        sequences, of_heads = members // heads, first + members % heads
        if len(members) == batch * heads:
            shape, k, v = (batch, heads), key[:, first:], value[:, first:]
        else:
            theirs = list(zip(sequences.tolist(), of_heads.tolist(), strict=True))
            k, v = (torch.stack([x[each] for each in theirs]).unsqueeze(0) for x in (key, value))
            shape = (1, len(members))
        rows, places = lists.rows(query, sequences, of_heads * size)
        taken = rows.index_select(0, places.flatten()).view(*shape, lists.length, -1)
        found = _attended(taken, k, v, lists, scaling).transpose(1, 2)
        rows, places = lists.rows(output.transpose(1, 2), sequences, of_heads * size)
        rows.index_copy_(0, places.view(*shape, -1).transpose(1, 2).flatten(), found.flatten(0, 2))
        left[members] = False
    readers = left.view(batch, 1, heads).repeat_interleave(size, 2)
    return chosen & functional.pad(readers, (first * size, 0), value=True)


def _alike(counts: list[int], least: int) -> Iterator[torch.Tensor]:
    """Heads of which about as many queries are chosen, at least so many together."""
    found: list[list[int]] = []
    for head in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
        if found and counts[head] >= LEAST_OF_MOST * counts[found[-1][0]]:
            found[-1].append(head)
        else:
            found.append([head])
    return (torch.tensor(sorted(some)) for some in found if len(some) >= least and counts[some[0]])


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lists: Lists, scaling: float
) -> torch.Tensor:
    """Outputs (B, n, R, d) of queries (B, n, R, d) to keys and values (B, n, S, d)."""
    batch, heads, length, size = query.shape
    output = query.new_empty(batch, length, heads, size).transpose(1, 2)  # as the kernel's lie
    logarithms, tokens = query.new_empty(query.shape[:3]), lists.tokens.view(query.shape[:3])
    for piece in lists.pieces:
        added = None if piece.whole else _added(tokens[..., piece.rows], piece.keys, query.dtype)
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
