"""Attention in blocks of queries, each with the keys that its queries may see.

A mask is read for that: keys which it hides from a whole block are left out, so that padding and windows cost
nothing. A query that sees no key at all weighs every key alike, as in eager attention, and so keeps all of them.
"""

from dataclasses import dataclass

import torch

LARGEST_BLOCK = 64
SMALLEST_BLOCK = 16
SCRATCH_NUMBERS = 2**23
"""Blocks get smaller where all that is held of one, a number for each head, query and key, would be more."""


@dataclass(frozen=True)
class Block:
    """Some queries of one sequence of the batch, and the keys that they meet."""

    item: int
    queries: slice
    keys: slice
    blind: bool = False
    """Some query sees no key."""

    @property
    def shape(self) -> tuple[int, int]:
        """How many queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def query_part(self, x: torch.Tensor) -> torch.Tensor:
        """What (B or 1, T or 1, ...) has for the block's queries."""
        return x[self.item if len(x) > 1 else 0, self.queries if x.shape[1] > 1 else slice(None)]

    def hide(self, logits: torch.Tensor, mask: torch.Tensor | None, later: torch.Tensor | None) -> None:
        """Hide keys from the block's logits (queries, heads, keys), in place: by a mask (B, heads or 1, T, S), or
        those that come after a query, by a triangle that counts keys from the first query.
        """
        lowest = torch.finfo(logits.dtype).min
        if later is not None:
            last = logits[..., self.queries.start :]
            last.masked_fill_(later[: last.shape[0], None, : last.shape[2]], lowest)
        elif mask is not None:
            part = mask[self.item, :, self.queries, self.keys].transpose(0, 1)
            if part.dtype == torch.bool:
                logits.masked_fill_(~part, lowest)
            else:
                logits += part

    def stop_gradient(self, grad: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Nothing comes back to logits (queries, heads, keys) that a boolean mask replaced, in place."""
        if self.blind and mask is not None and mask.dtype == torch.bool:  # elsewhere it is zero by itself
            grad.masked_fill_(~mask[self.item, :, self.queries, self.keys].transpose(0, 1), 0.0)


def block_size(heads: int, keys: int, tensors: int) -> int:
    """How many queries a block has of which so many tensors are held."""
    return max(SMALLEST_BLOCK, min(LARGEST_BLOCK, SCRATCH_NUMBERS // (tensors * heads * keys)))


def query_blocks(
    batch: int, queries: int, keys: int, size: int, mask: torch.Tensor | None, causal: bool
) -> list[Block]:
    """All blocks of `size` queries. `mask` is (batch, 1 or heads, queries, keys); `causal` counts where it is None."""
    starts = range(0, queries, size)
    parts = [(item, slice(start, min(start + size, queries))) for item in range(batch) for start in starts]
    if mask is None:
        return [Block(item, part, slice(0, min(part.stop, keys) if causal else keys)) for item, part in parts]
    seen = torch.stack([_seen_keys(mask[item, :, part]) for item, part in parts]).tolist()
    return [
        Block(*part, slice(first, last), blind=bool(blind))
        for part, (first, last, blind) in zip(parts, seen, strict=True)
    ]


def _seen_keys(mask: torch.Tensor) -> torch.Tensor:
    """The first key that some query sees, the one after the last, and whether some query sees none: then all count."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    columns, keys = visible.flatten(0, 1).any(0).int(), mask.shape[-1]
    blind = ~visible.any(-1).all()
    first = columns.argmax().masked_fill(blind, 0)
    last = (keys - columns.flip(0).argmax()).masked_fill(blind, keys)
    return torch.stack([first, last, blind.long()])
