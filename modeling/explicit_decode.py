"""Attention to component heads as the cache holds them, for few queries: the combined heads never exist.

`q_i . K_i = sum_j (C_ij q_i) . B_j`: the scalars go to the queries, and every query head meets every component. With
values, each head's weights meet every component, and the scalars come last: `o_i = sum_j C_ij (w_i B_j)`. What is read
is `h'` heads; what is multiplied is `h'` times that of plain attention, which pays while reading is what takes time.

Here queries are scaled, and stand by the combined head that they share: (B, h, rows, d), a row being one head's query
for one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .numerics import apply_mask, widened

BLOCK = 512
"""Keys of a block, about: a component's, with its logits, fit in a core's cache. Measured: 256 to 1024 are alike."""


@dataclass(frozen=True)
class Components:
    """Keys or values: (B, heads, S, d), and the scalars (h, heads) that combine them, None where nothing does."""

    heads: torch.Tensor
    scalars: torch.Tensor | None


@dataclass(frozen=True)
class OneSequence:
    """The same without the first dimension: heads (S, d), which may lie anywhere."""

    heads: Sequence[torch.Tensor]
    scalars: torch.Tensor | None


@dataclass(frozen=True)
class Blocks:
    """A cut of the keys into equal blocks; where that cannot be, each starts with the last keys of the one before."""

    count: int
    step: int
    repeated: int

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A view: blocks in the place of the keys, and a block's keys as the last dimension."""
        return x.unfold(dim, self.step + self.repeated, self.step)


def key_blocks(keys: torch.Tensor) -> Blocks | None:
    """None off the CPU, for few keys, and in a compiled graph, which must not depend on how many there are."""
    length = keys.shape[2]
    most = length // BLOCK
    if keys.device.type != "cpu" or torch.compiler.is_compiling() or most < 2:
        return None
    count = min(range(most - most // 4, most + 1), key=lambda count: length % count)
    return Blocks(count, length // count, length % count)


def attend_to_components(
    query: torch.Tensor,
    keys: Components,
    values: Components,
    scale: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Outputs of the shape of the queries.

    `scale` (B, h, 1, S) multiplies combined keys; `mask` (B or 1, 1, T, S) is as the backend gets it.
    """
    blocks = key_blocks(keys.heads)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clamp_min(torch.finfo(mask.dtype).min)  # a block that sees nothing stays finite
    if blocks is None:
        return _at_once(query, keys, values, scale, mask)
    parts = []
    for row in range(len(query)):  # a sequence at a time: its logits are still in the cache when they are used
        row_keys = OneSequence(list(keys.heads[row]), keys.scalars)
        row_values = OneSequence(list(values.heads[row]), values.scalars)
        row_scale = None if scale is None else scale[row]
        row_mask = None if mask is None else mask.expand(len(query), -1, -1, -1)[row]
        parts.append(in_blocks(query[row], row_keys, row_values, row_scale, row_mask, blocks))
    return torch.stack(parts)


def _at_once(
    query: torch.Tensor, keys: Components, values: Components, scale: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    logits = torch.matmul(fold_queries(query, keys.scalars), keys.heads.transpose(2, 3))
    if keys.scalars is not None:
        logits = logits.sum(1, dtype=widened(logits.dtype)).unflatten(1, (query.shape[1], -1))
    weights = torch.softmax(_settled(logits, scale, mask), -1).to(query.dtype)  # (B, h, rows, S)
    if values.scalars is not None:
        weights = weights.flatten(1, 2).unsqueeze(1)
    return unfold_outputs(torch.matmul(weights, values.heads), values.scalars)


def in_blocks(
    query: torch.Tensor,
    keys: OneSequence,
    values: OneSequence,
    scale: torch.Tensor | None,
    mask: torch.Tensor | None,
    blocks: Blocks,
) -> torch.Tensor:
    """The same of one sequence, (h, rows, d) of queries. Components are read where they lie, each once."""
    rows = fold_queries(query[None], keys.scalars)[0].unsqueeze(1).expand(-1, blocks.count, -1, -1)
    parts = [blocks.cut(head, 0) for head in keys.heads]
    pairs = list(zip(rows, parts, strict=True))  # of (blocks, rows, d) and (blocks, d, keys)
    logits = _summed(pairs) if keys.scalars is not None else torch.cat([torch.bmm(*pair) for pair in pairs], dim=1)
    logits = _settled(
        logits.unflatten(1, (len(query), -1)),
        None if scale is None else blocks.cut(scale, 2).permute(2, 0, 1, 3),
        None if mask is None else blocks.cut(mask, 2).permute(2, 0, 1, 3),
    )
    logits[1:, ..., : blocks.repeated] = -torch.inf
    weights = torch.softmax(logits, -1)  # (blocks, h, rows, keys), each block's own
    shares = _shares(logits, weights).to(query.dtype)
    weights = weights.to(query.dtype)
    if values.scalars is not None:
        weights, shares = weights.flatten(1, 2).unsqueeze(1), shares.flatten(1, 2).unsqueeze(1)
    met = []
    for index, head in enumerate(values.heads):  # every row meets every component, or else a head's rows their own
        of_head = index % weights.shape[1]
        products = torch.bmm(weights[:, of_head], blocks.cut(head, 0).transpose(1, 2))  # (blocks, rows, d)
        met.append((products * shares[:, of_head]).sum(0))
    return unfold_outputs(torch.stack(met)[None], values.scalars)[0]


def fold_queries(query: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, h, rows, d) -> (B, components, h * rows, d), or as they are where nothing combines keys."""
    if scalars is None:
        return query
    return (query.unsqueeze(1) * scalars.t()[:, :, None, None]).flatten(2, 3)


def unfold_outputs(met: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, components, h * rows, d) -> (B, h, rows, d), or as they are where nothing combines values."""
    if scalars is None:
        return met
    return (met.unflatten(2, (scalars.shape[0], -1)) * scalars.t()[:, :, None, None]).sum(1)


def _summed(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of the products, in the widened dtype."""
    total = torch.bmm(*pairs[0])
    total = total.to(widened(total.dtype))
    for pair in pairs[1:]:
        total = total.baddbmm_(*pair) if total.dtype == pair[0].dtype else total.add_(torch.bmm(*pair))
    return total


def _settled(logits: torch.Tensor, scale: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits (N, h, rows, keys) of normed keys, under the mask (N or 1, 1, T, keys)."""
    logits = logits.to(widened(logits.dtype))
    if scale is not None:
        logits = logits * scale
    if mask is None:
        return logits
    by_head = logits.flatten(1, 2).unflatten(1, (-1, mask.shape[2]))  # (N, H, T, keys)
    return apply_mask(by_head, mask).view(logits.shape)


def _shares(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """How much each block's weights, which sum to one, count beside the other blocks': (blocks, h, rows, 1)."""
    highest = logits.amax(-1, keepdim=True)
    # The largest weight is that of the highest logit: one divided by the block's sum of exponentials.
    shares = (highest - highest.amax(0, keepdim=True)).exp() / weights.amax(-1, keepdim=True)
    return shares / shares.sum(0, keepdim=True)
