"""Losses with masked heads equal the losses of models without these heads."""

from copy import deepcopy
from itertools import product

import pytest
import torch
from torch.nn import functional

import toys
from crosshead.evals.probe.masked_heads import counts_to_mask, head_counts, masked_heads

MODELS = {"stock": lambda: toys.stock_model("Qwen3"), "talking": lambda: toys.mixed_model("Qwen3", {"talking": {}})}


def silent(*_):
    pass


def loss_without(model, tokens, masked):
    """Return the loss with zeroed output projections of the masked heads; `masked` lists (layer, head)."""
    model = deepcopy(model)
    for layer, head in masked:
        weight = model.model.layers[layer].self_attn.o_proj.weight.data
        weight.unflatten(1, (model.config.num_attention_heads, -1))[:, head] = 0
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]().eval()


@pytest.mark.parametrize("options", [{"version": 2}, {"half_values": True}, {}])
def test_differential_heads_are_masked_per_output(options):
    model = toys.mixed_model("Llama", {"differential": options}).eval()
    size = model.config.head_dim
    heads = model.model.layers[0].self_attn.o_proj.in_features // size
    assert head_counts(model) == [heads] * 2
    (row,) = masked_heads(model, toys.tokens(), [heads - 1], 3, 0, silent)
    possible = [with_one_head(model, pair) for pair in product(range(heads), repeat=2)]
    nearest = [min(possible, key=lambda each: abs(each - loss)) for loss in row["losses"]]
    assert row["losses"] == pytest.approx(nearest, rel=1e-5)


def with_one_head(model, pair):
    """Return the loss with one head left in each of the two layers."""
    model = deepcopy(model)
    for layer, remaining in zip(model.model.layers, pair, strict=True):
        heads = layer.self_attn.o_proj.weight.data.unflatten(1, (-1, model.config.head_dim))
        heads[:, [head for head in range(heads.shape[1]) if head != remaining]] = 0
    return loss_without(model, toys.tokens(), [])


def test_masking_no_head_and_every_head(model):
    tokens = toys.tokens()
    heads = list(product(range(2), range(4)))
    none, every = masked_heads(model, tokens, [0, 4], 2, 0, silent)
    assert none["losses"] == pytest.approx([loss_without(model, tokens, [])], rel=1e-5)
    assert every["losses"] == pytest.approx([loss_without(model, tokens, heads)] * 2, rel=1e-5)


def test_each_draw_masks_a_random_head_per_layer(model):
    tokens = toys.tokens()
    (row,) = masked_heads(model, tokens, [1], 12, 0, silent)
    possible = {pair: loss_without(model, tokens, list(enumerate(pair))) for pair in product(range(4), repeat=2)}
    drawn = [min(possible, key=lambda pair: abs(possible[pair] - loss)) for loss in row["losses"]]
    assert row["losses"] == pytest.approx([possible[pair] for pair in drawn], rel=1e-5)
    assert len(set(drawn)) > 4
    assert any(first != second for first, second in drawn)
    assert row["loss"] == pytest.approx(sum(row["losses"]) / 12)


def test_losses_depend_on_seed_only_and_model_is_unchanged(model):
    tokens = toys.tokens()
    before = loss_without(model, tokens, [])
    steps = []
    first, again, other, large = (
        masked_heads(model, tokens, [0, 2], 3, seed, lambda *step: steps.append(step)) for seed in (5, 5, 6, 20261129)
    )
    assert first == again
    assert first[1]["losses"] != other[1]["losses"] != large[1]["losses"]
    assert steps[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert loss_without(model, tokens, []) == before


@pytest.mark.parametrize(
    ("heads", "counts"),
    [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [*range(9)]), (32, [0, 4, 8, 12, 16, 19, 23, 27, 31])],
)
def test_counts_to_mask(heads, counts):
    assert counts_to_mask(heads) == counts
