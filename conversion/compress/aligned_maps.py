"""Keys whose heads share components up to a turn and a scale of each pair of features, which `q_proj` takes in.

RoPE turns the features `p` and `p + d / 2` of a key as one complex number, so that a complex factor `a_p` commutes
with it: a key times `a` meets a query divided by `conj(a)`. By the argument that `aligned_values` gives for matrices,
one component and one fewer than heads lose nothing against complex mixing of heads pair by pair.

Where keys are normed (Qwen3), queries are too, by the same weights for all heads, and nothing can be taken in: there
heads are scalar combinations as they stand. Their scale is free.
"""

from collections.abc import Callable
from itertools import combinations

import torch

from .aligned_frame import Errors, Frame, refine, roots, simplex

Group = tuple[int, ...]


def cheapest_groups(heads: int, groups: int, cost: Callable[[Group], float]) -> list[Group]:
    """Put heads into groups, given what it costs to have one component for a group."""
    found: list[Group] = [(head,) for head in range(heads)]
    costs: dict[Group, float] = {group: cost(group) for group in found}
    while len(found) > groups:
        pairs = {tuple(sorted(left + right)): (left, right) for left, right in combinations(found, 2)}
        for pair in pairs.keys() - costs.keys():
            costs[pair] = cost(pair)
        rise = {pair: costs[pair] - costs[left] - costs[right] for pair, (left, right) in pairs.items()}
        best = min(sorted(rise), key=rise.__getitem__)
        found = sorted([group for group in found if group not in pairs[best]] + [best])
    return found


def membership(heads: int, groups: list[Group]) -> torch.Tensor:
    """Scalars (h, h'): 1 where a head belongs to a group."""
    scalars = torch.zeros(heads, len(groups), dtype=torch.float64)
    for index, group in enumerate(groups):
        scalars[list(group), index] = 1.0
    return scalars


FLOOR = 0.03
"""Maps that are inverted have no singular value below this part of the largest."""
VALUE_STEPS = 60


def aligned_values(errors: Errors, components: int) -> Frame:
    """The components that lose least."""
    heads, _, size, _ = errors.metric.shape
    root, inverse = roots(errors.pooled[0])  # each head in coordinates in which every direction matters alike
    even = errors.in_coordinates(root, inverse)
    start = (one_fewer if components == heads - 1 > 1 else grouped)(even.pooled[1], heads, size, components)
    return refine(start, even, lambda maps: maps, start.maps, VALUE_STEPS).out_of_coordinates(root, inverse)


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


KEY_STEPS = 120

Start = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Components as factors of heads (h', h, d / 2), factors of maps (h, d / 2), scalars (h, h')."""


def aligned_keys(errors: Errors, components: int) -> Frame:
    """The components that lose least, for keys without norm."""
    heads, _, size, _ = errors.metric.shape
    weights = errors.pooled[0].diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1)).mean(-2).sqrt()  # (h, d / 2)
    root, inverse = (pair_maps(torch.complex(x, torch.zeros_like(x))) for x in (weights, 1 / weights))
    even = errors.in_coordinates(root, inverse)
    pairs = _pairs(even.pooled[1], heads, size)
    mixed, factors, scalars = (_one_fewer if components == heads - 1 > 1 else _grouped)(pairs, components)
    start = Frame(_features(pair_maps(mixed), errors.gram.shape[-1]), scalars, pair_maps(factors))
    free = torch.view_as_real(factors.resolve_conj())
    return refine(start, even, _maps, free, KEY_STEPS).out_of_coordinates(root, inverse)


def mixed_keys(errors: Errors, components: int) -> Frame:
    """The components that lose least, for keys with a norm: scalar combinations of heads."""
    heads, _, size, _ = errors.metric.shape
    metric, gram = errors.pooled
    gram = gram[: heads * size, : heads * size].unflatten(1, (heads, size)).unflatten(0, (heads, size))
    across = torch.einsum("a,iaja->ij", metric.mean(0).diagonal(), gram)
    scalars = torch.linalg.eigh(across)[1][:, -components:]
    one = torch.eye(size).to(scalars)
    start = Frame(
        _features(torch.einsum("ij,ab->jiab", scalars, one), errors.gram.shape[-1]), scalars, one.expand(heads, -1, -1)
    )
    return refine(start, errors, lambda maps: maps, None, KEY_STEPS)


def pair_maps(factors: torch.Tensor) -> torch.Tensor:
    """Complex factors (..., d / 2) as real maps (..., d, d)."""
    real, imaginary = torch.diag_embed(factors.real), torch.diag_embed(factors.imag)
    return torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)


def _maps(free: torch.Tensor) -> torch.Tensor:
    return pair_maps(torch.view_as_complex(free))


def _pairs(gram: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """How heads go together, one complex matrix for each pair of features: (d / 2, h, h)."""
    gram = gram[: heads * size, : heads * size]
    blocks = gram.unflatten(1, (heads, 2, -1)).unflatten(0, (heads, 2, -1))
    pairs = torch.einsum("iapjbp->pabij", blocks)
    return torch.complex(pairs[:, 0, 0] + pairs[:, 1, 1], pairs[:, 1, 0] - pairs[:, 0, 1])


def _features(mixed: torch.Tensor, features: int) -> torch.Tensor:
    """(h', h, d, d) -> (h', d, n), with nothing from features that are no head's."""
    components = mixed.transpose(1, 2).flatten(2)
    return torch.nn.functional.pad(components, (0, features - components.shape[-1]))


def _grouped(pairs: torch.Tensor, components: int) -> Start:
    heads = pairs.shape[-1]

    def spectrum(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linalg.eigh(pairs[:, list(group)][:, :, list(group)])

    groups = cheapest_groups(heads, components, lambda group: float(spectrum(group)[0][:, :-1].sum()))
    mixed, factors = pairs.new_zeros(components, heads, len(pairs)), pairs.new_zeros(heads, len(pairs))
    for index, group in enumerate(groups):
        main = spectrum(group)[1][:, :, -1].T * len(group) ** 0.5  # (members, d / 2), of size 1 in the mean
        factors[list(group)] = main
        mixed[index, list(group)] = main.conj() / len(group)
    return mixed, factors, membership(heads, groups)


def _one_fewer(pairs: torch.Tensor, components: int) -> Start:
    heads = pairs.shape[-1]
    null = torch.linalg.eigh(pairs)[1][:, :, 0].T  # sum_i conj(null_i) key_i is next to nothing: (h, d / 2)
    kept = torch.eye(heads).unsqueeze(-1) - null.unsqueeze(1) * null.conj().unsqueeze(0)
    turned = torch.polar(null.abs().clamp_min(FLOOR) * heads**0.5, -null.angle())
    scalars = simplex(heads)
    back = torch.linalg.pinv(scalars).to(pairs)
    return torch.einsum("ji,ip,ikp->jkp", back, turned, kept), 1 / turned, scalars
