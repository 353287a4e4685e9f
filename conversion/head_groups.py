"""Which heads share a component: groups that are merged two by two, the cheapest pair first."""

from collections.abc import Callable
from itertools import combinations

import torch

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
