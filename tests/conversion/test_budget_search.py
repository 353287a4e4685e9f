"""Losses are those of the compressed models themselves, and the choice is the best there is."""

from itertools import product

import pytest
import torch
from transformers import AutoConfig

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.streamed_model import StreamedModel
from crosshead.conversion.calibration.text import Text
from crosshead.conversion.compress.budget_search import choose, counts_to_try, measure_losses
from crosshead.conversion.compress.head_groups import Counts
from crosshead.conversion.sources.resolve import open_source
from crosshead.modeling.mechanisms.base import HeadLayout
from tiers import grid
from toy_checkpoints import write_stock


def layouts(heads, layers, size=8, eps=None):
    return [
        HeadLayout(
            hidden_size=16, query_heads=heads, key_value_heads=heads, head_dim=size, layer_index=i, key_norm_eps=eps
        )
        for i in range(layers)
    ]


def random_losses(heads, layers, seed):
    generator = torch.Generator().manual_seed(seed)
    trials = product(range(layers), ("key", "value"), counts_to_try(heads))
    return {trial: float(torch.rand((), generator=generator)) for trial in trials}


def cached_numbers(pairs, heads, size, eps):
    extra = [heads if eps and min(pair) < heads else 0 for pair in pairs]
    return sum(sum(pair) * size for pair in pairs) + sum(extra)


def by_trial(losses, heads, layers, size, eps, budget):
    """The least summed loss within the budget, over every combination."""
    room = budget * layers * 2 * heads * size
    counts = [heads, *counts_to_try(heads)]
    best = None
    for pairs in product(product(counts, counts), repeat=layers):
        if cached_numbers(pairs, heads, size, eps) <= room:
            rise = sum(
                losses[layer, side, count]
                for layer, pair in enumerate(pairs)
                for side, count in zip(("key", "value"), pair, strict=True)
                if count < heads
            )
            best = rise if best is None else min(best, rise)
    return best


@pytest.mark.parametrize("eps", [None, 1e-6], ids=["plain", "key norm"])
@pytest.mark.parametrize("heads", [2, 3, 4])
@pytest.mark.parametrize("budget", [0.5, 0.6, 0.75, 0.9])
def test_the_best_choice(budget, heads, eps):
    for seed in range(5):
        losses = random_losses(heads, 3, seed)
        expected = by_trial(losses, heads, 3, 8, eps, budget)
        if expected is None:
            with pytest.raises(ConversionError, match="budget"):
                choose(losses, layouts(heads, 3, eps=eps), budget)
            continue
        choice = choose(losses, layouts(heads, 3, eps=eps), budget)
        pairs = choice.pairs
        assert cached_numbers(pairs, heads, 8, eps) == pytest.approx(choice.cache * 3 * 2 * heads * 8)
        assert choice.cache <= budget and choice.loss == pytest.approx(expected)
        found = sum(
            losses[layer, side, count]
            for layer, pair in enumerate(pairs)
            for side, count in zip(("key", "value"), pair, strict=True)
            if count < heads
        )
        assert found == pytest.approx(expected)


def test_many_heads_are_tried_in_quarters():
    assert counts_to_try(2) == [1]
    assert counts_to_try(4) == [1, 2, 3]
    assert counts_to_try(8) == [2, 4, 6]
    assert counts_to_try(32) == [8, 16, 24]
    assert [counts_to_try(8, groups) for groups in (2, 4, 8)] == [[2, 4, 6], [4], []]


@pytest.mark.parametrize(("backbone", "groups"), grid(["Qwen3", "Qwen2", "Llama"], [1, 2], strength=1))
def test_a_trials_loss_is_that_of_the_compressed_model(backbone, groups, tmp_path):
    folder = write_stock(tmp_path / "source", backbone, num_key_value_heads=4)
    source = open_source(folder, scratch=tmp_path)
    stock = toys.STOCK[backbone][0].from_pretrained(folder)
    target = toys.mixed_config(backbone, {}, num_key_value_heads=4)
    tokens = Text(None).windows(source, 64, 1, stock.vocab_size)
    model = StreamedModel(source.store, stock)
    kept = [Counts(4, 4, groups)] * 2
    losses = measure_losses(model, source.store, target.layouts(), kept, None, "svd", tokens, lambda *done: None)
    assert losses.keys() == set(product(range(2), ("key", "value"), (1, 2, 3) if groups == 1 else (2,)))
    expected = toys.STOCK[backbone][1].from_pretrained(folder)(tokens).logits[:, ::2].log_softmax(-1)
    for (layer, side, count), loss in losses.items():
        counts = [4, 4]
        counts[layer] = count
        mixers = {"explicit": {f"{side}_heads": counts, "groups": groups, "method": "svd"}}
        crosshead.convert(folder, tmp_path / "out", mixers, verify=False, overwrite=True)
        made = getattr(crosshead, f"Crosshead{backbone}ForCausalLM").from_pretrained(tmp_path / "out")
        found = made(tokens).logits[:, ::2].log_softmax(-1)
        divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
        assert loss == pytest.approx(divergence, rel=1e-3, abs=1e-6)


def test_layers_are_fitted_to_the_counts_that_were_chosen(tmp_path):
    """As if the counts had been asked for."""
    source, text = (
        write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4),
        tmp_path / "text.txt",
    )
    text.write_text("a quick brown fox jumps over the lazy dog, and then it sleeps; " * 40)
    options = {"calibration": text, "verify": False}
    chosen = crosshead.convert(source, tmp_path / "chosen", {}, cache="60%", **options)["chosen"]
    asked = AutoConfig.from_pretrained(tmp_path / "chosen", trust_remote_code=True).mixers["explicit"]
    assert [asked["key_heads"], asked["value_heads"]] == [chosen["key_heads"], chosen["value_heads"]]
    crosshead.convert(source, tmp_path / "asked", {"explicit": asked}, **options)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("chosen", "asked")]
    assert files[0] == files[1]
