"""The assignment of heads to groups of equal size, and the choice of the number of groups."""

from itertools import permutations

import pytest
import torch
from transformers import AutoConfig

import crosshead
import toys
from crosshead.conversion.compress.head_groups import Counts, equal_groups, query_order
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead_command.screen import calibration_lines
from toy_checkpoints import write_model, write_stock


def random_cost(heads, seed):
    """Return a random cost function of a group that is not a sum over pairs of heads."""
    numbers = torch.rand(heads, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda group: float(numbers[list(group)].prod(0).sum() - numbers[list(group)].max(0).values.prod())


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 3), (6, 2), (8, 4), (8, 1), (3, 3)])
def test_few_heads_are_grouped_at_minimum_cost(heads, groups):
    size = heads // groups
    for seed in range(3):
        cost = random_cost(heads, seed)
        assignment = equal_groups(heads, groups, cost)
        assert sorted(head for group in assignment for head in group) == list(range(heads))
        assert all(len(group) == size and group == tuple(sorted(group)) for group in assignment)
        orders = permutations(range(heads)) if heads <= 6 else [range(heads)]
        totals = [sum(cost(tuple(sorted(order[i : i + size]))) for i in range(0, heads, size)) for order in orders]
        assert sum(map(cost, assignment)) <= min(totals) + 1e-12


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (12, 4), (32, 8)])
def test_similar_heads_are_grouped_and_equal_costs_keep_order(heads, groups):
    size = heads // groups
    kinds = [head % groups for head in range(heads)]
    assignment = equal_groups(heads, groups, lambda group: len({kinds[head] for head in group}) - 1.0)
    assert assignment == [tuple(range(kind, heads, groups)) for kind in range(groups)]
    same = equal_groups(heads, groups, lambda group: 0.0)
    assert same == [tuple(range(start, start + size)) for start in range(0, heads, size)]


def test_query_order_follows_key_value_head_order():
    layout = HeadLayout(hidden_size=16, query_heads=6, key_value_heads=3, head_dim=8)
    assert query_order([2, 0, 1], layout) == [4, 5, 0, 1, 2, 3]


def test_labels_encode_counts_groups_and_order():
    counts = [Counts(2, 4), Counts(2, 4, 2), Counts(2, 4, 2, True), Counts(2, 2, 2), Counts(2, 4, 1, True)]
    assert [each.label("2") for each in counts] == [
        "2",
        "2x4.2groups",
        "2x4.2groups.reordered",
        "2x2.2groups",
        "2",
    ]
    assert (counts[0].sides, min(counts[0].sides.values())) == ({"key": 2, "value": 4}, 2)


@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_auto_layers_choose_counts_divisible_by_groups(method, tmp_path):
    source = write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    mixers, options = {"explicit": {"groups": 2, "method": method}}, {"layers": "auto", "budget": 0.8}
    (tmp_path / "prose.txt").write_text(PROSE)
    options |= {"calibration": tmp_path / "prose.txt"} if method == "aligned" else {}
    report = crosshead.convert(source, tmp_path / "made", mixers, **options)
    assert report["verification"]["reload"]["greatest_logit_difference"] < 1e-4
    assert {*report["chosen"]["key_heads"], *report["chosen"]["value_heads"]} == {2, 4}


COMBINATIONS = {"pairs": [[1, 0], [0, 1], [1.5, 0], [0, 0.5]], "all": [[1, 0], [0, 1], [1, 1], [1, -1]]}
"""Weights of two components in four heads: one component per head, in groups (0, 2) and (1, 3), or both."""
HALF = {"key_heads": 2, "value_heads": 2}
PROSE = "a quick brown fox jumps over the lazy dog, and then it sleeps; " * 40


def write_combined_heads(folder, combinations):
    """Write a toy whose four key and value heads are combinations of two components."""
    model = toys.stock_model("Llama", num_attention_heads=8, num_key_value_heads=4)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
                heads = weight.unflatten(0, (4, -1))
                heads.copy_(torch.einsum("ij,jdn->idn", torch.tensor(combinations).float(), heads[:2].clone()))
    return write_model(model, folder)


@pytest.fixture(scope="module", params=COMBINATIONS)
def combined_checkpoint(request, tmp_path_factory):
    return request.param, write_combined_heads(
        tmp_path_factory.mktemp(request.param) / "source", COMBINATIONS[request.param]
    )


def test_number_of_groups_is_chosen_by_fitted_error(combined_checkpoint, tmp_path):
    name, source = combined_checkpoint
    saved, groups = tmp_path / "saved.safetensors", {"pairs": 2, "all": 1}[name]
    text = tmp_path / "text.txt"
    text.write_text(PROSE)
    requested = {"explicit": HALF}
    report = crosshead.convert(source, tmp_path / "made", requested, calibration=text, save_calibration=saved)
    assert report["chosen"]["groups"] == groups and "groups" not in report["options"]["mixers"]["explicit"]
    config = AutoConfig.from_pretrained(tmp_path / "made", trust_remote_code=True)
    assert config.mixers["explicit"]["groups"] == groups
    errors = report["chosen"]["fitted_errors"]
    assert errors["1"] == 1 and (errors["2"] > 1.1) == (name == "all")
    assert report["verification"]["kl_divergence"] < 1e-5
    assert f"groups of heads: {groups}; fitted error by groups, relative to one group's:" in calibration_lines(report)
    again = crosshead.convert(source, tmp_path / "again", requested, calibration=saved, verify=False)
    plan = crosshead.convert(source, tmp_path / "plan", requested, calibration=text, plan_only=True)
    assert report["chosen"] == again["chosen"] == plan["chosen"]
    assert report["tensors"] == again["tensors"]
    weight = plan["tensors"]["model.layers.0.self_attn.mixers.explicit.key.weight"]
    assert weight["shape"] == [4, 2 // groups]


@pytest.mark.parametrize(
    "mixers",
    [
        {"explicit": HALF | {"groups": 1}},
        {"explicit": HALF | {"method": "svd"}},
        {"explicit": {}},
        {"explicit": {"key_heads": 3, "value_heads": 2}},
        {"explicit": HALF, "mixture": {"active_heads": 6}},
    ],
    ids=str,
)
def test_requests_without_group_search_use_one_group(mixers, tmp_path):
    source = write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    is_fitted = mixers["explicit"] and mixers["explicit"].get("method") != "svd"
    (tmp_path / "text.txt").write_text(PROSE)
    options = {"calibration": tmp_path / "text.txt"} if is_fitted else {}
    report = crosshead.convert(source, tmp_path / "made", mixers, verify=False, **options)
    assert report["options"]["mixers"]["explicit"]["groups"] == 1
    assert "chosen" not in report
