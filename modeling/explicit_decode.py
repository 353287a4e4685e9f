"""Attention to component heads as the cache holds them, for few queries: the combined heads never exist.

`q_i . K_i = sum_j (C_ij q_i) . B_j`: the scalars go to the queries, and a token's components, side by side, are one
long key, `[C_i1 q_i, C_i2 q_i, ...] . [B_1, B_2, ...]`. With values, each head's weights meet the long values, and the
scalars come last: `o_i = sum_j C_ij (w_i B_j)`. What is read is `h'` heads; what is multiplied is `h'` times that of
plain attention, which pays while reading is what takes time.

Here queries are scaled, and stand by the combined head that they share: (B, h, rows, d), a row being one head's query
for one token. A side that nothing combines has a matrix for each head in place of one for all.
"""

from dataclasses import dataclass

import torch

from .few_queries import met_one_by_one, settled, weighed_one_by_one
from .head_cache import merge_heads

LARGE = 2**22
"""Multiplications of a matrix from which on matrices are met one by one. Measured: with half as many, all at once is
as fast."""


@dataclass(frozen=True)
class Components:
    """Keys or values: (B, heads, S, d), and the scalars (h, heads) that combine them, None where nothing does.

    With scalars, they are copied unless the heads of a token lie side by side.
    """

    heads: torch.Tensor
    scalars: torch.Tensor | None

    @property
    def matrices(self) -> torch.Tensor:
        """(B, 1, S, heads * d), or (B, h, S, d) where nothing combines them."""
        return self.heads if self.scalars is None else merge_heads(self.heads).unsqueeze(1)


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
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clamp_min(torch.finfo(mask.dtype).min)  # what sees nothing stays finite
    logits = _met(fold_queries(query, keys.scalars), keys.matrices).reshape(*query.shape[:3], -1)
    weights = torch.softmax(settled(logits, scale, mask), -1).to(query.dtype)  # (B, h, rows, S)
    if values.scalars is not None:
        weights = weights.flatten(1, 2).unsqueeze(1)
    return unfold_outputs(_weighed(weights, values.matrices), values.scalars)


def fold_queries(query: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, h, rows, d) -> (B, 1, h * rows, components * d), or as they are where nothing combines keys."""
    if scalars is None:
        return query
    folded = query.unsqueeze(3) * scalars.unsqueeze(1).unsqueeze(3)  # (B, h, rows, components, d)
    return folded.reshape(len(query), 1, scalars.shape[0] * query.shape[2], -1)


def unfold_outputs(met: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, 1, h * rows, components * d) -> (B, h, rows, d), or as they are where nothing combines values."""
    if scalars is None:
        return met
    heads, components = scalars.shape
    by_component = met.view(len(met), heads, -1, components, met.shape[3] // components)
    return (by_component * scalars.unsqueeze(1).unsqueeze(3)).sum(3)


def _met(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logits (B, n, rows, S) of rows (B, n, rows, k) with keys (B, n, S, k)."""
    if not _one_by_one_pays(rows, keys):
        return torch.matmul(rows, keys.transpose(2, 3))
    return met_one_by_one(_each(rows), _each(keys)).unflatten(0, rows.shape[:2])


def _weighed(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values (B, n, S, k) under weights (B, n, rows, S): (B, n, rows, k)."""
    if not _one_by_one_pays(weights, values):
        return torch.matmul(weights, values)
    return weighed_one_by_one(_each(weights), _each(values)).unflatten(0, weights.shape[:2])


def _each(matrices: torch.Tensor) -> list[torch.Tensor]:
    """Where they lie, of every sequence."""
    return [matrix for of_sequence in matrices for matrix in of_sequence]


def _one_by_one_pays(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Never off the CPU, nor in a compiled graph, which must not depend on how many keys there are."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return rows.shape[2] * matrices[0, 0].numel() >= LARGE
