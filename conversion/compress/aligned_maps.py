"""Fits of `Frame`s to keys and values for method `aligned`: a start from eigenvectors, then L-BFGS.

Values: `o_proj` can absorb any linear map of a head.

Keys without a norm: RoPE rotates the features `p` and `p + d / 2` of a key as one complex number, so that a complex
factor `a_p` commutes with the rotation: the logit of a key times `a` and a query divided by `conj(a)` does not change.
Maps are such factors, absorbed by `q_proj`.

Keys with a norm (Qwen3): the query norm follows `q_proj`, and all heads share its weights, so that no map can be
absorbed. Heads are plain scalar combinations, whose scale is free.
"""

from collections.abc import Callable
from itertools import combinations

import torch

from .aligned_frame import Errors, Frame, refine, roots, simplex
from .head_groups import Group

FLOOR = 0.03
"""Minimum singular value of value maps, relative to the largest, and magnitude of key factors before inversion."""
VALUE_STEPS = 60
"""Maximum number of L-BFGS iterations for values."""
KEY_STEPS = 120
"""Maximum number of L-BFGS iterations for keys."""
EXACT = 0.1
"""L-BFGS starts from combinations without maps if their error is below this fraction of the other start's error."""

Start = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Start for keys: complex factors of heads in components (h', h, d / 2) and in maps (h, d / 2); scalars (h, h')."""


def cheapest_groups(heads: int, count: int, cost: Callable[[Group], float]) -> list[Group]:
    """Partition heads into `count` groups by greedy merging; `cost` is the error of one component for a group."""
    groups: list[Group] = [(head,) for head in range(heads)]
    costs: dict[Group, float] = {group: cost(group) for group in groups}
    while len(groups) > count:
        pairs = {tuple(sorted(left + right)): (left, right) for left, right in combinations(groups, 2)}
        for pair in pairs.keys() - costs.keys():
            costs[pair] = cost(pair)
        rise = {pair: costs[pair] - costs[left] - costs[right] for pair, (left, right) in pairs.items()}
        best = min(sorted(rise), key=rise.__getitem__)
        groups = sorted([group for group in groups if group not in pairs[best]] + [best])
    return groups


def membership(heads: int, groups: list[Group]) -> torch.Tensor:
    """Return scalars (h, h') that are 1 if a head belongs to a group, else 0."""
    scalars = torch.zeros(heads, len(groups), dtype=torch.float64)
    for index, group in enumerate(groups):
        scalars[list(group), index] = 1.0
    return scalars


def aligned_values(errors: Errors, components: int, refines: bool = True) -> Frame:
    """Return the frame that is fitted to values; without `refines`, the start of L-BFGS."""
    heads, _, size, _ = errors.metric.shape
    root, inverse = roots(errors.pooled[0])  # coordinates in which each head's metric is the identity
    whitened = errors.transformed(root, inverse)
    make_start = one_fewer_values if components == heads - 1 > 1 else grouped_values
    plain = _scalar_start(errors, components).from_transformed(inverse, root)
    start = make_start(whitened.pooled[1], heads, size, components)
    start = plain if _is_exact(plain, start, whitened) else start
    steps = VALUE_STEPS if refines else 0
    return (
        refine(start, whitened, lambda maps: maps, start.maps, steps)
        .from_transformed(root, inverse)
        .with_normalised_maps()
    )


def grouped_values(gram: torch.Tensor, heads: int, size: int, components: int) -> Frame:
    """Return a start with one component per group of heads: the group's principal directions in the Gram matrix."""
    blocks = _blocks(gram, heads, size)

    def spectrum(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = blocks[list(group)][:, :, list(group)]
        return torch.linalg.eigh(chosen.flatten(2).flatten(0, 1))

    groups = cheapest_groups(heads, components, lambda group: float(spectrum(group)[0][:-size].sum()))
    maps = gram.new_zeros(heads, size, size)
    combined = gram.new_zeros(components, size, heads, size)
    for index, group in enumerate(groups):
        directions = spectrum(group)[1][:, -size:].unflatten(0, (-1, size))  # (members, d, d)
        maps[list(group)] = directions
        combined[index][:, list(group)] = directions.permute(2, 0, 1)
    return Frame(_padded(combined.flatten(2), gram.shape[0]), membership(heads, groups), maps)


def one_fewer_values(gram: torch.Tensor, heads: int, size: int, components: int) -> Frame:
    """Return a start with h - 1 components: maps from the Gram matrix's null directions make the heads sum to zero."""
    count = heads * size
    null = torch.linalg.eigh(gram[:count, :count])[1][:, :size]
    projector = torch.eye(count).to(gram) - null @ null.T
    left, values, right = torch.linalg.svd(null.T.unflatten(1, (heads, size)).transpose(0, 1))
    values = values.clamp_min(FLOOR * float(values.max()))
    aligned = (left * values.unsqueeze(-2)) @ right @ projector.unflatten(0, (heads, size))
    scalars = simplex(heads).to(gram)
    combined = torch.einsum("ji,idn->jdn", torch.linalg.pinv(scalars), aligned)
    return Frame(_padded(combined, gram.shape[0]), scalars, (right.mT / values.unsqueeze(-2)) @ left.mT)


def aligned_keys(errors: Errors, components: int, refines: bool = True) -> Frame:
    """Return the frame that is fitted to keys without a norm; without `refines`, the start of L-BFGS."""
    heads, _, size, _ = errors.metric.shape
    weights = errors.pooled[0].diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1)).mean(-2).sqrt()  # (h, d / 2)
    root, inverse = (pair_maps(torch.complex(x, torch.zeros_like(x))) for x in (weights, 1 / weights))
    whitened = errors.transformed(root, inverse)
    pairs = _pairs(whitened.pooled[1], heads, size)
    combined, factors, scalars = (one_fewer_keys if components == heads - 1 > 1 else grouped_keys)(pairs, components)
    start = Frame(_features(pair_maps(combined), errors.gram.shape[-1]), scalars, pair_maps(factors))
    plain = _scalar_start(errors, components).from_transformed(inverse, root)
    if _is_exact(plain, start, whitened):
        start, factors = plain, torch.complex(weights, torch.zeros_like(weights))
    parameters, steps = torch.view_as_real(factors.resolve_conj()), KEY_STEPS if refines else 0
    frame = refine(start, whitened, lambda x: pair_maps(torch.view_as_complex(x)), parameters, steps)
    return frame.from_transformed(root, inverse).with_normalised_maps()


def mixed_keys(errors: Errors, components: int, refines: bool = True) -> Frame:
    """Return the frame without maps that is fitted to keys with a norm; without `refines`, the start of L-BFGS."""
    return refine(_scalar_start(errors, components), errors, lambda maps: maps, None, KEY_STEPS if refines else 0)


def _scalar_start(errors: Errors, components: int) -> Frame:
    """Return a start without maps: components are the scalar combinations of heads with the largest variance."""
    heads, _, size, _ = errors.metric.shape
    metric, gram = errors.pooled
    across = torch.einsum("a,iaja->ij", metric.mean(0).diagonal(), _blocks(gram, heads, size))
    scalars = torch.linalg.eigh(across)[1][:, -components:]
    identity = torch.eye(size).to(scalars)
    combined = _features(torch.einsum("ij,ab->jiab", scalars, identity), errors.gram.shape[-1])
    return Frame(combined, scalars, identity.expand(heads, -1, -1))


def _is_exact(plain: Frame, start: Frame, errors: Errors) -> bool:
    """True if `plain` has a much smaller error than `start`, because heads are scalar combinations of each other.

    If its error is only a little smaller, L-BFGS from `plain` often ends with a larger error.
    """
    return bool(errors.total(plain) < EXACT * errors.total(start))


def pair_maps(factors: torch.Tensor) -> torch.Tensor:
    """Return complex factors (..., d / 2) as real maps (..., d, d)."""
    real, imaginary = torch.diag_embed(factors.real), torch.diag_embed(factors.imag)
    return torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)


def _blocks(gram: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """Return the Gram matrix (n, n) split by head: (h, d, h, d)."""
    return gram[: heads * size, : heads * size].unflatten(1, (heads, size)).unflatten(0, (heads, size))


def _pairs(gram: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """Return the Gram matrix (n, n) of heads as one complex matrix per RoPE pair of features: (d / 2, h, h)."""
    halves = _blocks(gram, heads, size).unflatten(3, (2, -1)).unflatten(1, (2, -1))
    pairs = torch.einsum("iapjbp->pabij", halves)
    return torch.complex(pairs[:, 0, 0] + pairs[:, 1, 1], pairs[:, 1, 0] - pairs[:, 0, 1])


def _features(combined: torch.Tensor, features: int) -> torch.Tensor:
    """Reshape components from blocks by head (h', h, d, d) to (h', d, n)."""
    return _padded(combined.transpose(1, 2).flatten(2), features)


def _padded(components: torch.Tensor, features: int) -> torch.Tensor:
    """Pad components (h', d, h d) to (h', d, n) with zeros for features that belong to no head."""
    return torch.nn.functional.pad(components, (0, features - components.shape[-1]))


def grouped_keys(pairs: torch.Tensor, components: int) -> Start:
    """Return a start with one component per group of heads: its principal directions in `pairs` (d / 2, h, h)."""
    heads = pairs.shape[-1]

    def spectrum(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.linalg.eigh(pairs[:, list(group)][:, :, list(group)])

    groups = cheapest_groups(heads, components, lambda group: float(spectrum(group)[0][:, :-1].sum()))
    combined, factors = pairs.new_zeros(components, heads, len(pairs)), pairs.new_zeros(heads, len(pairs))
    for index, group in enumerate(groups):
        direction = spectrum(group)[1][:, :, -1].T * len(group) ** 0.5  # (members, d / 2), with a mean square of 1
        factors[list(group)] = direction
        combined[index, list(group)] = direction.conj() / len(group)
    return combined, factors, membership(heads, groups)


def one_fewer_keys(pairs: torch.Tensor, components: int) -> Start:
    """Return a start with h - 1 components: factors from the null directions make the heads sum to zero."""
    heads = pairs.shape[-1]
    null = torch.linalg.eigh(pairs)[1][:, :, 0].T  # sum_i conj(null_i) key_i is nearly zero: (h, d / 2)
    projector = torch.eye(heads).unsqueeze(-1) - null.unsqueeze(1) * null.conj().unsqueeze(0)
    factors = torch.polar(null.abs().clamp_min(FLOOR) * heads**0.5, -null.angle())
    scalars = simplex(heads)
    inverse = torch.linalg.pinv(scalars).to(pairs)
    return torch.einsum("ji,ip,ikp->jkp", inverse, factors, projector), 1 / factors, scalars
