"""The default tier of a grid is a covering subset of it."""

from itertools import combinations, product

import pytest

from tiers import covering, first, grid


def default_tier(parameters):
    return [parameter.values for parameter in parameters if not parameter.marks]


@pytest.mark.parametrize("strength", [1, 2])
def test_default_tier_covers_the_grid_at_its_strength(strength):
    axes = [range(4), "abcde", (True, False), ("x", "y", "z")]
    parameters = grid(*axes, strength=strength)
    assert [parameter.values for parameter in parameters] == list(product(*axes))
    default = default_tier(parameters)
    for subset in combinations(range(len(axes)), strength):
        covered = {tuple(values[axis] for axis in subset) for values in default}
        assert covered == set(product(*(axes[axis] for axis in subset)))
    assert len(default) == 5 if strength == 1 else 20 <= len(default) < 30
    assert default == default_tier(grid(*axes, strength=strength)) == covering(*axes, strength=strength)


def test_only_the_first_value_is_in_the_default_tier():
    plain, *slow = first("abc")
    assert plain == "a"
    assert [parameter.values for parameter in slow] == [("b",), ("c",)]
    assert all(mark.name == "slow" for parameter in slow for mark in parameter.marks)
