"""Talking-Heads in memory that grows linearly with the sequence: a block of queries at a time.

The plain computation, in `talking`, is the reference. Here no tensor has all queries and all keys of all heads: each
block's logits and weights lie in memory that the next block uses again, and the backward pass computes them anew.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from .numerics import widened
from .query_blocks import Block, block_size, query_blocks

HELD = 2
"""Tensors of a block's size at a time."""


@dataclass(frozen=True)
class TalkingCall:
    """The tensors of one attention call. Queries, keys and values have one dtype, maps its widened one."""

    query: torch.Tensor
    """(B, H, T, d)."""
    key: torch.Tensor
    """(B, groups, S, d)."""
    value: torch.Tensor
    """(B, groups, S, features)."""
    logits_map: torch.Tensor
    """(B or 1, T or 1, to, from): of each query, or one for all."""
    logits_key_map: torch.Tensor | None
    """(B, S, to, from): what each key adds to it."""
    weights_map: torch.Tensor
    weights_key_map: torch.Tensor | None
    mask: torch.Tensor | None
    """(B or 1, heads or 1, T or 1, S)."""
    scaling: float
    causal: bool
    """Without a mask, query `t` sees the keys up to `t`; else it sees all."""
    later: torch.Tensor | None = None
    """Where a block is causal without a mask: which of its keys, counted from its first query, come after a query."""

    def settled(self, held: int) -> "TalkingCall":
        """The same with heads that lie each in one piece, a mask of full size, and the scaling in the first map."""
        settled: dict[str, Any] = {side: getattr(self, side).contiguous() for side in ("query", "key", "value")}
        batch, _, queries, _ = self.query.shape
        for name in ("logits_map", "logits_key_map"):
            maps = getattr(self, name)
            settled[name] = None if maps is None else maps * self.scaling
        settled["mask"] = None if self.mask is None else self.mask.expand(batch, -1, queries, -1)
        if self.mask is None and self.causal:
            size = min(self.block_size(held), queries)
            settled["later"] = torch.ones(size, size, dtype=torch.bool, device=self.query.device).triu(1)
        return replace(self, **settled)

    def blocks(self, held: int) -> list[Block]:
        """Blocks of queries with the keys that they see, by the tensors that are held of each."""
        batch, _, queries, _ = self.query.shape
        return query_blocks(batch, queries, self.key.shape[2], self.block_size(held), self.mask, self.causal)

    def block_size(self, held: int) -> int:
        """How many queries a block has."""
        return block_size(self.most_heads(), self.key.shape[2], held)

    def most_heads(self) -> int:
        """Of queries, softmax and values."""
        return max(*self.logits_map.shape[2:], *self.weights_map.shape[2:])


class Scratch:
    """Memory that every block uses again: new memory costs as much as what is computed in it."""

    def __init__(self, call: TalkingCall, blocks: list[Block], tensors: int) -> None:
        numbers = call.most_heads() * max(math.prod(block.shape) for block in blocks)
        self._memory = call.query.new_empty(tensors, numbers, dtype=widened(call.query.dtype))

    def take(self, index: int, *shape: int) -> torch.Tensor:
        """The tensor of that index, in that shape."""
        return self._memory[index, : math.prod(shape)].view(shape)


def attend_in_blocks(call: TalkingCall) -> torch.Tensor:
    """Outputs (B, T, heads, features)."""
    call = call.settled(HELD)
    blocks = call.blocks(HELD)
    scratch = Scratch(call, blocks, HELD)
    batch, _, queries, _ = call.query.shape
    output = call.value.new_empty(batch, queries, call.weights_map.shape[2], call.value.shape[3])
    for block in blocks:
        weights = block_weights(call, block, block_logits(call, block, scratch), scratch)
        mixed = mix(call.weights_map, call.weights_key_map, block, weights, scratch, 0)
        weigh(mixed, call.value[block.item, :, block.keys], output[block.item, block.queries].transpose(0, 1))
    return output


def block_logits(call: TalkingCall, block: Block, scratch: Scratch) -> torch.Tensor:
    """Logits (queries, heads, keys) before scaling and the first map, in scratch 0."""
    return met(call.query[block.item, :, block.queries], call.key[block.item, :, block.keys], scratch, 0)


def block_weights(call: TalkingCall, block: Block, logits: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Weights (queries, heads, keys) before the second map, in scratch 1."""
    mixed = mix(call.logits_map, call.logits_key_map, block, logits, scratch, 1)
    block.hide(mixed, call.mask, call.later)
    return torch.softmax(mixed, dim=-1, out=mixed)


def met(rows: torch.Tensor, columns: torch.Tensor, scratch: Scratch, index: int) -> torch.Tensor:
    """Products (T, H, S) of rows (H, T, d) with columns (groups, S, d); the heads of a group share columns."""
    (heads, queries, size), (groups, keys, _) = rows.shape, columns.shape
    out = scratch.take(index, heads, queries, keys)
    rows, found = rows.reshape(groups, -1, size), out.view(groups, -1, keys)
    if rows.dtype == out.dtype:
        torch.bmm(rows, columns.transpose(1, 2), out=found)
    else:
        found.copy_(torch.bmm(rows, columns.transpose(1, 2)))
    return out.transpose(0, 1)


def weigh(maps: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of columns (groups, S, d), as maps (T, H, S) weigh them, into `out` (H, T, d)."""
    members = maps.shape[1] // columns.shape[0]
    for member in range(members):  # rather than copies of the columns for each head of a group
        of_member = maps[:, member::members].transpose(0, 1)
        out[member::members] = torch.bmm(of_member.to(columns.dtype), columns)


def mix(
    maps: torch.Tensor,
    key_maps: torch.Tensor | None,
    block: Block,
    given: torch.Tensor,
    scratch: Scratch,
    index: int,
) -> torch.Tensor:
    """Map a block (queries, from, keys) across heads: (queries, to, keys)."""
    static = block.query_part(maps).expand(given.shape[0], -1, -1)
    out = scratch.take(index, given.shape[0], maps.shape[2], given.shape[2])
    torch.bmm(static, given, out=out)
    if key_maps is not None:
        out += torch.einsum("sij,tjs->tis", key_maps[block.item, block.keys], given)
    return out
