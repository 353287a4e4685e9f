"""Component heads of a layer, and the assignment of its KV heads to groups that share components."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from crosshead.modeling.mechanisms.base import HeadLayout

EXHAUSTIVE = 8
"""The number of heads up to which all assignments are compared."""

Group = tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """Component heads of a layer's keys and of its values."""

    key: int
    value: int
    groups: int = 1
    reorders: bool = False
    """Whether heads are assigned to groups by their fitted error; otherwise a group has consecutive heads."""

    @property
    def sides(self) -> dict[str, int]:
        """The component heads by side."""
        return {"key": self.key, "value": self.value}

    @property
    def fewest(self) -> int:
        """The component heads of the side that has fewer."""
        return min(self.key, self.value)

    def label(self, text: str) -> str:
        """Part of a name in the calibration: the text; with groups, their number, and whether heads are reordered."""
        if self.groups == 1:
            return text
        return f"{self.key}x{self.value}.{self.groups}groups{'.reordered' * self.reorders}"


def equal_groups(heads: int, groups: int, cost: Callable[[Group], float]) -> list[Group]:
    """Assign heads to groups of one size: the minimum total cost for up to 8 heads, above that greedily.

    Greedily, each group starts with the first head that is left, and grows by the head with the minimum cost. `cost`
    is a group's error; also that of a group that is not complete yet. Of equal costs, the lowest heads win.
    """
    size, cost = heads // groups, cache(cost)
    if heads <= EXHAUSTIVE:
        return min(_partitions(tuple(range(heads)), size), key=lambda found: sum(map(cost, found)))
    rest, found = list(range(heads)), list[Group]()
    while rest:
        group: Group = (rest.pop(0),)
        while len(group) < size:
            group = min((tuple(sorted((*group, head))) for head in rest), key=cost)
            rest = [head for head in rest if head not in group]
        found.append(group)
    return found


def _partitions(heads: Group, size: int) -> Iterator[list[Group]]:
    """Every way to divide heads into groups of one size."""
    if not heads:
        yield []
        return
    for others in combinations(heads[1:], size - 1):
        rest = tuple(head for head in heads[1:] if head not in others)
        yield from ([(heads[0], *others), *further] for further in _partitions(rest, size))


def query_order(order: list[int], layout: HeadLayout) -> list[int]:
    """The order of query heads that follow their KV heads."""
    size = layout.query_heads // layout.key_value_heads
    return [head * size + place for head in order for place in range(size)]
