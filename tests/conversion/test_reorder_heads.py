"""Reordered heads compute the same outputs, and the most used heads come first as far as groups allow."""

from itertools import permutations

import pytest
import torch

import toys
from crosshead.conversion.compress.reorder_heads import HeadUse, most_used_first, reorder


def greatest_use_of_any_order(use, groups, shared):
    """Return the greatest total use of the first `shared` heads over all orders that keep groups together."""
    size = len(use) // groups
    best = 0.0
    for order in permutations(range(groups)):
        full, partial = divmod(shared, size)
        total = sum(use[group * size : (group + 1) * size].sum() for group in order[:full])
        if partial:
            split = order[full]
            total += use[split * size : (split + 1) * size].sort(descending=True).values[:partial].sum()
        best = max(best, float(total))
    return best


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shared", range(1, 9))
def test_most_used_heads_come_first_within_groups(groups, shared):
    for seed in range(20):
        use = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        order = most_used_first(use, groups, shared)
        assert sorted(order) == list(range(8))
        size = 8 // groups
        for start in range(0, 8, size):
            assert len({head // size for head in order[start : start + size]}) == 1
        assert float(use[order[:shared]].sum()) == pytest.approx(greatest_use_of_any_order(use, groups, shared))


@pytest.mark.parametrize("mixers", [{}, {"explicit": {"norm": False, "key_heads": 1}}], ids=["stock", "components"])
@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_reordered_heads_give_same_logits(backbone, mixers):
    model = toys.mixed_model(backbone, mixers).double()
    tokens = toys.tokens()
    before = model(tokens).logits
    layout = model.config.layout_of_layer(0)
    for layer in range(2):
        attention = model.get_submodule(f"model.layers.{layer}.self_attn")
        order = most_used_first(torch.tensor([0.1, 0.4, 0.3, 0.9]), 2, 1)
        assert order == [3, 2, 1, 0]
        attention.load_state_dict(reorder(attention.state_dict(), order, layout))
    assert torch.allclose(model(tokens).logits, before, atol=1e-12)


def test_head_use_counts_heads_chosen_by_router():
    model = toys.stock_model("Llama")
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    use = HeadUse(heads=4, active=2)
    use.observe(attention, hidden, None)
    use.observe(attention, hidden, None)
    expected = torch.zeros(4, dtype=torch.float64)
    for token in attention.q_proj(hidden).reshape(-1, 4, 8):
        for head in sorted(range(4), key=lambda head, token=token: -token[head].norm().item())[:2]:
            expected[head] += 2
    assert torch.equal(use.sums["counts"], expected)
