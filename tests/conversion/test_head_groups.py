"""The assignment of heads to groups of one size."""

from itertools import permutations

import pytest
import torch

import crosshead
from crosshead.conversion.compress.head_groups import Counts, equal_groups, query_order
from crosshead.modeling.mechanisms.base import HeadLayout
from toy_checkpoints import write_stock


def random_cost(heads, seed):
    """A cost of each group that is not a sum over pairs."""
    numbers = torch.rand(heads, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda group: float(numbers[list(group)].prod(0).sum() - numbers[list(group)].max(0).values.prod())


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 3), (6, 2), (8, 4), (8, 1), (3, 3)])
def test_few_heads_are_assigned_at_the_minimum_cost(heads, groups):
    size = heads // groups
    for seed in range(3):
        cost = random_cost(heads, seed)
        found = equal_groups(heads, groups, cost)
        assert sorted(head for group in found for head in group) == list(range(heads))
        assert all(len(group) == size and group == tuple(sorted(group)) for group in found)
        orders = permutations(range(heads)) if heads <= 6 else [range(heads)]
        every = [sum(cost(tuple(sorted(order[i : i + size]))) for i in range(0, heads, size)) for order in orders]
        assert sum(map(cost, found)) <= min(every) + 1e-12


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (12, 4), (32, 8)])
def test_kinds_of_heads_stay_together_and_equal_costs_keep_the_order(heads, groups):
    size = heads // groups
    kinds = [head % groups for head in range(heads)]
    found = equal_groups(heads, groups, lambda group: len({kinds[head] for head in group}) - 1.0)
    assert found == [tuple(range(kind, heads, groups)) for kind in range(groups)]
    same = equal_groups(heads, groups, lambda group: 0.0)
    assert same == [tuple(range(start, start + size)) for start in range(0, heads, size)]


def test_query_heads_follow():
    layout = HeadLayout(hidden_size=16, query_heads=6, key_value_heads=3, head_dim=8)
    assert query_order([2, 0, 1], layout) == [4, 5, 0, 1, 2, 3]


def test_names_tell_what_was_fitted_apart():
    counts = [Counts(2, 4), Counts(2, 4, 2), Counts(2, 4, 2, True), Counts(2, 2, 2), Counts(2, 4, 1, True)]
    assert [each.label("2") for each in counts] == [
        "2",
        "2x4.2groups",
        "2x4.2groups.reordered",
        "2x2.2groups",
        "2",
    ]
    assert (counts[0].sides, counts[0].fewest) == ({"key": 2, "value": 4}, 2)


@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_layers_with_groups_are_chosen_within_a_budget(method, tmp_path):
    source = write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    asked, options = {"explicit": {"groups": 2, "method": method}}, {"layers": "auto", "budget": 0.8}
    report = crosshead.convert(source, tmp_path / "made", asked, **options)
    assert report["verification"]["reload"]["greatest_logit_difference"] < 1e-4
    assert {*report["chosen"]["key_heads"], *report["chosen"]["value_heads"]} == {2, 4}
