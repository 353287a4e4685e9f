"""Component counts of a layer, and the assignment of its KV heads to groups that share components."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from crosshead.modeling.mechanisms.base import HeadLayout

EXHAUSTIVE = 8
"""Maximum number of heads for an exhaustive search of assignments."""

Group = tuple[int, ...]
"""Indices of the heads in a group, in ascending order."""


@dataclass(frozen=True)
class Counts:
    """Numbers of component heads of a layer's keys and values."""

    key: int
    value: int
    groups: int = 1
    reorders: bool = False
    """True if heads are assigned to groups by their fitted error; otherwise a group has consecutive heads."""

    @property
    def sides(self) -> dict[str, int]:
        """Side ("key", "value") -> number of component heads."""
        return {"key": self.key, "value": self.value}

    def label(self, text: str) -> str:
        """Return a label for names in a calibration: `text` for one group, else counts, groups and reordering."""
        if self.groups == 1:
            return text
        return f"{self.key}x{self.value}.{self.groups}groups{'.reordered' * self.reorders}"


def equal_groups(heads: int, groups: int, cost: Callable[[Group], float]) -> list[Group]:
    """Assign heads to groups of equal size: with the minimum total cost for up to 8 heads, greedily for more heads.

    The greedy search starts a group with the first unassigned head, and adds the head with the minimum cost until the
    group is complete. `cost` is the error of a group, complete or not. Ties go to the lowest head indices.
    """
    size, cost = heads // groups, cache(cost)
    if heads <= EXHAUSTIVE:
        return min(_partitions(tuple(range(heads)), size), key=lambda assignment: sum(map(cost, assignment)))
    unassigned, assignment = list(range(heads)), list[Group]()
    while unassigned:
        group: Group = (unassigned.pop(0),)
        while len(group) < size:
            group = min((tuple(sorted((*group, head))) for head in unassigned), key=cost)
            unassigned = [head for head in unassigned if head not in group]
        assignment.append(group)
    return assignment


def _partitions(heads: Group, size: int) -> Iterator[list[Group]]:
    """Yield every partition of heads into groups of equal size."""
    if not heads:
        yield []
        return
    for others in combinations(heads[1:], size - 1):
        rest = tuple(head for head in heads[1:] if head not in others)
        yield from ([(heads[0], *others), *further] for further in _partitions(rest, size))


def query_order(order: list[int], layout: HeadLayout) -> list[int]:
    """Return the order of query heads for an order of KV heads."""
    size = layout.query_heads // layout.key_value_heads
    return [head * size + offset for head in order for offset in range(size)]
