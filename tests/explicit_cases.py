"""Random `explicit` attention calls over component heads, with the oracle and with eager attention as references."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import oracle_arithmetic
from crosshead.modeling.mechanisms.explicit import explicit_attention_forward
from crosshead.modeling.ops import attention_weights, weigh_values

Attend = Callable[..., tuple[torch.Tensor, Any]]
MASKS = ("none", "left", "right", "window", "packed", "future", "nothing")


@dataclass
class Components:
    """Component heads (B, heads, S, d) and the scalars (h, heads / groups) that combine them, or None."""

    heads: torch.Tensor
    scalars: torch.Tensor | None

    @property
    def matrix(self) -> torch.Tensor:
        """The scalars as one block-diagonal matrix (h, heads)."""
        assert self.scalars is not None
        return torch.block_diag(*self.scalars.chunk(self.heads.shape[1] // self.scalars.shape[1]))


@dataclass
class Case:
    """Random sizes and tensors of one call, in float64."""

    query: torch.Tensor
    keys: Components
    values: Components
    scale: torch.Tensor | None
    allowed: torch.Tensor
    mask: torch.Tensor | None

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Tensors whose gradients are compared."""
        leaves = [self.query, self.keys.heads, self.values.heads, self.keys.scalars, self.values.scalars, self.scale]
        return [x for x in leaves if x is not None]

    def ours(self, dtype: torch.dtype = torch.float64, attend: Attend = explicit_attention_forward) -> torch.Tensor:
        """Return the output of the function under test (B, T, H, d)."""

        def cast(x: Any) -> Any:
            return x if x is None or x.dtype == torch.bool else x.to(dtype)

        mask = cast(self.mask)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.clamp_min(torch.finfo(dtype).min)  # like transformers' additive masks
        scale = None if self.scale is None else self.scale.squeeze(2).to(torch.promote_types(dtype, torch.float32))
        maps = {"key_map": cast(self.keys.scalars), "value_map": cast(self.values.scalars), "key_scale": scale}
        heads = cast(self.query), cast(self.keys.heads), cast(self.values.heads)
        return attend(None, *heads, mask, scaling=1.0, implementation="sdpa", **maps)[0]

    @property
    def combined(self) -> int:
        """Number of combined key/value heads."""
        return len(self.keys.heads[0]) if self.keys.scalars is None else len(self.keys.scalars)

    def truth(self) -> torch.Tensor:
        """Return the output of the oracle (B, T, H, d), computed token by token."""
        return torch.stack([self._sequence(row) for row in range(len(self.query))])

    def _sequence(self, row: int) -> torch.Tensor:
        sides = []
        for side in (self.keys, self.values):
            tokens = [[head[s] for head in side.heads[row]] for s in range(side.heads.shape[2])]
            sides.append(
                [token if side.scalars is None else oracle_arithmetic.combine(token, side.matrix) for token in tokens]
            )
        if self.scale is not None:
            sides[0] = [[self.scale[row, i, 0, s] * k for i, k in enumerate(t)] for s, t in enumerate(sides[0])]
        outputs = []
        for t in range(self.query.shape[2]):
            for head in range(self.query.shape[1]):
                source = head * self.combined // self.query.shape[1]
                logits = torch.stack([self.query[row, head, t] @ key[source] for key in sides[0]])
                weights = oracle_arithmetic.softmax_over_allowed(logits, self.allowed[row, t])
                outputs.append(oracle_arithmetic.add(weights[s] * value[source] for s, value in enumerate(sides[1])))
        return torch.stack(outputs).unflatten(0, (-1, self.query.shape[1]))

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return eager attention over the combined heads (B, T, H, d) in a dtype."""
        key, value = (
            x.heads.to(dtype)
            if x.scalars is None
            else torch.einsum("ij,bjsd->bisd", x.matrix.to(dtype), x.heads.to(dtype))
            for x in (self.keys, self.values)
        )
        key = key if self.scale is None else key * self.scale.to(dtype).transpose(2, 3)
        mask = self.allowed[:, None]
        return weigh_values(attention_weights(self.query.to(dtype), key, mask, 1.0), value)


def visible(kind: str, batch: int, length: int, keys: int) -> torch.Tensor:
    """Return which keys the last queries of a text may attend to (B, T, S), for a kind of MASKS."""
    filled = keys - (keys // 3 if kind == "future" and keys - keys // 3 >= length else 0)
    position = torch.arange(filled - length, filled)[:, None]
    allowed = (torch.arange(keys) <= position).expand(batch, -1, -1).clone()
    for row in range(batch):
        if kind in ("left", "nothing"):
            allowed[row, :, : keys if kind == "nothing" and row else min(row + 1, keys - length)] = False
        elif kind == "right":
            allowed[row, :, max(filled - length - row, 1) : filled - length] = False
        elif kind == "window":
            allowed[row] &= torch.arange(keys) > position - 4
        elif kind == "packed":
            allowed[row, :, : (filled - length) // 2] = False
    return allowed


def make(seed: int) -> Case:
    """Return a random case, determined by a seed."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups = draw.choice((1, 1, 2, 3))
    batch, full, shared, size = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4), draw.choice((1, 3, 8))
    length, kind = draw.choice((1, 1, 1, 2, 3)), draw.choice(MASKS)
    keys = length + draw.choice((0, 1, 2, 5, 9, 16))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    def side(combined: bool) -> Components:
        heads = groups * (draw.randint(1, full) if combined else full)
        scalars = normal(groups * full, heads // groups) if combined else None
        if draw.random() < 0.5:
            return Components(normal(batch, heads, keys, size), scalars)
        wide = normal(batch, keys, heads * size + 2)[..., :-2]  # strided: a slice of a wider tensor
        return Components(wide.unflatten(-1, (heads, size)).transpose(1, 2), scalars)

    on = draw.choice(((True, True), (True, True), (True, False), (False, True)))
    sides = [side(combined) for combined in on]
    scale = normal(batch, groups * full, 1, keys).abs() + 0.1 if draw.random() < 0.4 else None
    kind = kind if length == 1 or kind != "none" else "window"
    allowed = visible(kind, batch, length, keys)
    mask: torch.Tensor | None = allowed[:, None]
    if kind == "none":
        mask = None
    elif draw.random() < 0.5:
        hidden = -math.inf if allowed.any(-1).all() and draw.random() < 0.5 else torch.finfo(torch.float64).min
        mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, hidden)[:, None]
    query = 2 * normal(batch, groups * full * shared, length, size)
    return Case(query, *sides, scale, allowed, mask)
