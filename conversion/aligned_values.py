"""Values whose heads share components up to any invertible map, which `o_proj` takes in.

With one component, or one fewer than heads, this loses nothing against components mixed by arbitrary matrices: one
component is a projection on `d` dimensions, and heads that live in `(h - 1) d` dimensions satisfy `d` linear
relations `sum_i Z_i v_i = 0`, after which the aligned heads `Z_i v_i` sum to zero.
"""

import torch

from .aligned_frame import Errors, Frame, refine, roots, simplex
from .head_groups import Group, cheapest_groups, membership

FLOOR = 0.03
"""Maps that are inverted have no singular value below this part of the largest."""
STEPS = 60


def aligned_values(errors: Errors, components: int) -> Frame:
    """The components that lose least."""
    heads, _, size, _ = errors.metric.shape
    root, inverse = roots(errors.pooled[0])  # each head in coordinates in which every direction matters alike
    even = errors.in_coordinates(root, inverse)
    start = (one_fewer if components == heads - 1 > 1 else grouped)(even.pooled[1], heads, size, components)
    return refine(start, even, lambda maps: maps, start.maps, STEPS).out_of_coordinates(root, inverse)


def grouped(gram: torch.Tensor, heads: int, size: int, components: int) -> Frame:
    """Groups of heads, one component each: the principal directions of a group, given all heads' Gram matrix."""
    blocks = gram[: heads * size, : heads * size].unflatten(1, (heads, size)).unflatten(0, (heads, size))

    def spectrum(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = blocks[list(group)][:, :, list(group)]
        return torch.linalg.eigh(chosen.flatten(2).flatten(0, 1))

    groups = cheapest_groups(heads, components, lambda group: float(spectrum(group)[0][:-size].sum()))
    maps = gram.new_zeros(heads, size, size)
    mixed = gram.new_zeros(components, size, heads, size)
    for index, group in enumerate(groups):
        directions = spectrum(group)[1][:, -size:].unflatten(0, (-1, size))  # (members, d, d)
        maps[list(group)] = directions
        mixed[index][:, list(group)] = directions.permute(2, 0, 1)
    return Frame(_widened(mixed.flatten(2), gram), membership(heads, groups), maps)


def one_fewer(gram: torch.Tensor, heads: int, size: int, components: int) -> Frame:
    """The null directions of the best approximation, as one map for each head; the aligned heads sum to zero."""
    count = heads * size
    null = torch.linalg.eigh(gram[:count, :count])[1][:, :size]
    kept = torch.eye(count).to(gram) - null @ null.T
    left, values, right = torch.linalg.svd(null.T.unflatten(1, (heads, size)).transpose(0, 1))
    values = values.clamp_min(FLOOR * float(values.max()))
    aligned = (left * values.unsqueeze(-2)) @ right @ kept.unflatten(0, (heads, size))
    scalars = simplex(heads).to(gram)
    mixed = torch.einsum("ji,idn->jdn", torch.linalg.pinv(scalars), aligned)
    return Frame(_widened(mixed, gram), scalars, (right.mT / values.unsqueeze(-2)) @ left.mT)


def _widened(components: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """With nothing from features that are no head's."""
    return torch.nn.functional.pad(components, (0, gram.shape[0] - components.shape[-1]))
