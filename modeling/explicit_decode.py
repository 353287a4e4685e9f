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

from .attention_in_parts import attended_in_parts, takes
from .few_queries import met_one_by_one, settled, weighed_one_by_one
from .head_cache import merge_heads
from .quick_products import is_quicker

LARGE, LARGER = 2**22, 2**24
"""Multiplications of a matrix from which on matrices are met one by one, where oneDNN is quicker, and where it is not;
with half as many, all at once is as fast. Where it is not, torch's kernel can do the whole, and does from the first.
Measured."""
KERNEL_ROWS = 32
"""So many the kernel takes at once; of more, it reads all keys again for others."""


@dataclass(frozen=True)
class Components:
    """Keys or values: (B, heads, S, d), and the scalars (h, heads) that combine them, None where nothing does.

    With scalars, they are copied unless the heads of a token lie side by side.
    """

    heads: torch.Tensor
    scalars: torch.Tensor | None

    @property
    def matrices(self) -> torch.Tensor:
        """(B, S, heads * d), or (B * h, S, d) where nothing combines them."""
        return self.heads.flatten(0, 1) if self.scalars is None else merge_heads(self.heads)


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
    rows, of_keys, of_values = fold_queries(query, keys.scalars), keys.matrices, values.matrices
    if scale is None and takes(rows, of_keys, of_values, mask) and _kernel_pays(rows, of_keys):
        met = attended_in_parts(rows, of_keys, of_values, mask)
    else:
        logits = _met(rows, of_keys).reshape(*query.shape[:3], -1)
        weights = torch.softmax(settled(logits, scale, mask), -1).to(query.dtype)  # (B, h, rows, S)
        met = _weighed(weights.view(of_values.shape[0], -1, weights.shape[3]), of_values)
    return met.view(query.shape) if values.scalars is None else unfold_outputs(met, query.shape, values.scalars)


def fold_queries(query: torch.Tensor, scalars: torch.Tensor | None) -> torch.Tensor:
    """(B, h, rows, d) -> (B, h * rows, components * d), or (B * h, rows, d) where nothing combines keys."""
    if scalars is None:
        return query.flatten(0, 1)
    batch, heads, rows, _ = query.shape
    folded = query.unsqueeze(3) * scalars.view(heads, 1, -1, 1)  # (B, h, rows, components, d)
    return folded.reshape(batch, heads * rows, -1)


def unfold_outputs(met: torch.Tensor, shape: torch.Size, scalars: torch.Tensor) -> torch.Tensor:
    """(B, h * rows, components * d) -> (B, h, rows, d), which is the shape."""
    heads, components = scalars.shape
    by_component = met.view(*shape[:3], components, shape[3])
    return torch.matmul(scalars.view(heads, 1, 1, components), by_component).squeeze(3)


def _met(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logits (N, rows, S) of rows (N, rows, k) with keys (N, S, k)."""
    return met_one_by_one(rows, keys) if _one_by_one_pays(rows, keys) else torch.bmm(rows, keys.transpose(1, 2))


def _weighed(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values (N, S, k) under weights (N, rows, S): (N, rows, k)."""
    return weighed_one_by_one(weights, values) if _one_by_one_pays(weights, values) else torch.bmm(weights, values)


def _one_by_one_pays(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Never off the CPU, nor in a compiled graph, which must not depend on how many keys there are."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return _multiplications(rows, matrices) >= (LARGE if is_quicker(rows) else LARGER)


def _kernel_pays(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Its products are MKL's."""
    few = rows.shape[1] <= KERNEL_ROWS and not is_quicker(rows)
    return few and _multiplications(rows, matrices) >= LARGE


def _multiplications(rows: torch.Tensor, matrices: torch.Tensor) -> int:
    return rows.shape[1] * matrices.shape[1] * matrices.shape[2]
