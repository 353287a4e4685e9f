"""What the default tier keeps of a grid covers it."""

from itertools import combinations, product

import pytest

from tiers import covering, first, grid


def tier(parameters):
    return [each.values for each in parameters if not each.marks]


@pytest.mark.parametrize("strength", [1, 2])
def test_a_grid_is_whole_and_its_default_tier_covers_it(strength):
    axes = [range(4), "abcde", (True, False), ("x", "y", "z")]
    parameters = grid(*axes, strength=strength)
    assert [each.values for each in parameters] == list(product(*axes))
    kept = tier(parameters)
    for some in combinations(range(len(axes)), strength):
        seen = {tuple(values[axis] for axis in some) for values in kept}
        assert seen == set(product(*(axes[axis] for axis in some)))
    assert len(kept) == 5 if strength == 1 else 20 <= len(kept) < 30
    assert kept == tier(grid(*axes, strength=strength)) == covering(*axes, strength=strength)


def test_the_first_values_are_in_the_default_tier():
    plain, *slow = first("abc")
    assert plain == "a"
    assert [each.values for each in slow] == [("b",), ("c",)]
    assert all(mark.name == "slow" for each in slow for mark in each.marks)
