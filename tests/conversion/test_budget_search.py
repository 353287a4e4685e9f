"""Measured losses equal those of the converted models, and the chosen counts of heads are the optimum."""

from itertools import product

import pytest
import torch
from transformers import AutoConfig

import crosshead
import toys
from broken import config, value
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration import head_statistics
from crosshead.conversion.calibration.streamed_model import StreamedModel
from crosshead.conversion.calibration.text import Text
from crosshead.conversion.compress import fitted_router, joint_fit
from crosshead.conversion.compress.budget_search import (
    ACTIVE,
    ActiveTrials,
    ComponentTrials,
    active_to_try,
    choose,
    choose_active,
    counts_to_try,
    measure_losses,
)
from crosshead.conversion.compress.head_groups import Counts
from crosshead.conversion.compress.layer_rewrites import PROJECTIONS
from crosshead.conversion.sources.resolve import open_source
from crosshead.modeling.mechanisms.base import HeadLayout
from tiers import first, grid
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


def cached_numbers(pairs, heads, size, eps, scales=1):
    return sum(sum(pair) * size + (scales * heads if eps and min(pair) < heads else 0) for pair in pairs)


def optimal_loss_by_enumeration(losses, heads, layers, size, eps, budget):
    """Return the least summed loss within the budget over all combinations, or None if none fits."""
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
def test_choose_finds_optimal_component_counts_within_budget(budget, heads, eps):
    for seed in range(5):
        losses = random_losses(heads, 3, seed)
        expected = optimal_loss_by_enumeration(losses, heads, 3, 8, eps, budget)
        if expected is None:
            with pytest.raises(ConversionError, match="too small"):
                choose(losses, layouts(heads, 3, eps=eps), budget)
            continue
        choice = choose(losses, layouts(heads, 3, eps=eps), budget)
        pairs = list(zip(*choice.heads.values(), strict=True))
        assert cached_numbers(pairs, heads, 8, eps) == pytest.approx(choice.fraction * 3 * 2 * heads * 8)
        assert choice.fraction <= budget and choice.loss == pytest.approx(expected)
        total = sum(
            losses[layer, side, count]
            for layer, pair in enumerate(pairs)
            for side, count in zip(("key", "value"), pair, strict=True)
            if count < heads
        )
        assert total == pytest.approx(expected)


@pytest.mark.parametrize(("dtype", "scales"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 2), (None, 1)])
def test_half_precision_key_scale_counts_as_two_cached_numbers(dtype, scales):
    for seed in range(5):
        choice = choose(random_losses(4, 3, seed), layouts(4, 3, eps=1e-6), 0.75, dtype)
        pairs = list(zip(*choice.heads.values(), strict=True))
        numbers = cached_numbers(pairs, 4, 8, 1e-6, scales)
        assert numbers == pytest.approx(choice.fraction * 3 * 2 * 4 * 8) and choice.fraction <= 0.75


@pytest.mark.parametrize("dtype", first([torch.bfloat16, torch.float32]))
def test_chosen_cache_share_equals_measured_cache_share(dtype, tmp_path):
    source = write_stock(tmp_path / "source", "Qwen3", None, dtype, num_attention_heads=4, num_key_value_heads=4)
    (tmp_path / "text.txt").write_text(" ".join(f"w{number * number % 53}" for number in range(900)))
    report = crosshead.convert(source, tmp_path / "out", {}, cache="75%", calibration=tmp_path / "text.txt")
    before, after = (report["verification"][f"kv_bytes_per_token_{when}"] for when in ("before", "after"))
    assert report["chosen"]["cache"] == pytest.approx(after / before, abs=1e-6)


def test_cache_without_dtype_in_config_is_counted_in_stored_dtype(text, tmp_path):
    source = write_stock(tmp_path / "source", "Qwen3", None, torch.bfloat16, num_key_value_heads=4)
    config(dtype=...)(source)
    planned = crosshead.convert(source, tmp_path / "out", {}, cache="80%", calibration=text, plan_only=True)
    assert planned["kv_bytes_per_token_after"] / planned["kv_bytes_per_token_before"] <= 0.8


def test_component_counts_are_tried_in_quarters():
    assert counts_to_try(2) == [1]
    assert counts_to_try(4) == [1, 2, 3]
    assert counts_to_try(8) == [2, 4, 6]
    assert counts_to_try(32) == [8, 16, 24]
    assert [counts_to_try(8, groups) for groups in (2, 4, 8)] == [[2, 4, 6], [4], []]


@pytest.mark.parametrize(("backbone", "groups"), grid(["Qwen3", "Qwen2", "Llama"], [1, 2], strength=1))
def test_component_trial_loss_equals_divergence_of_converted_model(backbone, groups, tmp_path):
    folder = write_stock(tmp_path / "source", backbone, num_key_value_heads=4)
    source = open_source(folder, scratch=tmp_path)
    stock = toys.STOCK[backbone][0].from_pretrained(folder)
    target = toys.mixed_config(backbone, {}, num_key_value_heads=4)
    tokens = Text(None).windows(source, 64, 3, stock.vocab_size)
    model = StreamedModel(source.store, stock)
    uncompressed = [Counts(4, 4, groups)] * 2
    trials = ComponentTrials(source.store, stock, target.layouts(), uncompressed, None, "svd")
    losses = measure_losses(model, [trials], tokens, lambda *done: None)
    assert losses.keys() == set(product(range(2), ("key", "value"), (1, 2, 3) if groups == 1 else (2,)))
    expected = toys.STOCK[backbone][1].from_pretrained(folder)(tokens).logits[:, ::2].log_softmax(-1)
    for (layer, side, count), loss in losses.items():
        counts = [4, 4]
        counts[layer] = count
        mixers = {"explicit": {f"{side}_heads": counts, "groups": groups, "method": "svd"}}
        crosshead.convert(folder, tmp_path / "out", mixers, verify=False, overwrite=True)
        made = getattr(crosshead, f"Crosshead{backbone}ForCausalLM").from_pretrained(tmp_path / "out")
        log_probabilities = made(tokens).logits[:, ::2].log_softmax(-1)
        divergence = (expected.exp() * (expected - log_probabilities)).sum(-1).mean().item()
        assert loss == pytest.approx(divergence, rel=1e-3, abs=1e-6)


@pytest.mark.slow  # the test of both budgets chooses component heads, too
def test_cache_budget_gives_same_weights_as_its_chosen_counts(tmp_path):
    source = write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    text = tmp_path / "text.txt"
    text.write_text("a quick brown fox jumps over the lazy dog, and then it sleeps; " * 40)
    options = {"calibration": text, "verify": False}
    chosen = crosshead.convert(source, tmp_path / "chosen", {}, cache="60%", **options)["chosen"]
    explicit = AutoConfig.from_pretrained(tmp_path / "chosen", trust_remote_code=True).mixers["explicit"]
    assert [explicit["key_heads"], explicit["value_heads"]] == [chosen["key_heads"], chosen["value_heads"]]
    crosshead.convert(source, tmp_path / "asked", {"explicit": explicit}, **options)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("chosen", "asked")]
    assert files[0] == files[1]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a quick brown fox jumps over the lazy dog, and then it sleeps; " * 100)
    return path


@pytest.mark.parametrize(
    "arguments", [{"mixers": {"explicit": {"key_heads": 1}}}, {"mixers": {}, "active": "75%"}], ids=str
)
def test_nan_in_checkpoint_is_refused(arguments, text, tmp_path):
    source = write_stock(tmp_path / "source")
    value("model.layers.0.mlp.up_proj.weight", float("nan"))(source)
    with pytest.raises(ConversionError, match="nan"):
        crosshead.convert(source, tmp_path / "out", calibration=text, **arguments)


def test_active_head_counts_are_tried_in_sixths():
    assert active_to_try(4) == [1, 2, 3]
    assert active_to_try(9) == [2, 3, 4, 6, 8]
    assert active_to_try(32) == [5, 11, 16, 21, 27]


@pytest.mark.parametrize("percent", range(5, 100, 5))
def test_budget_is_used_up_despite_rounding(percent):
    """Budgets must tolerate rounding: in floating point, 0.7 times 180 is less than 126."""
    trials = product(range(30), PROJECTIONS, (1, 2))
    losses = {(layer, side, count): float(10 - count) for layer, side, count in trials}
    losses |= {(layer, ACTIVE, count): float(10 - count) for layer in range(30) for count in range(1, 9)}
    units = percent * 30 * 6 // 100
    if units >= 60:  # one component for each side and layer
        assert choose(losses, layouts(3, 30, 8), percent / 100).fraction == pytest.approx(units / 180)
    active = percent * 30 * 9 // 100
    if active >= 30:
        assert sum(choose_active(losses, layouts(9, 30), percent / 100).heads["active_heads"]) == active


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.75, 0.9])
def test_choose_active_finds_optimal_counts_within_budget(budget):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        trials = product(range(3), ("active",), (1, 2, 3))
        losses = {trial: float(torch.rand((), generator=generator)) for trial in trials}
        options = [{4: 0.0} | {count: losses[layer, "active", count] for count in (1, 2, 3)} for layer in range(3)]
        within = [picks for picks in product(*options) if sum(picks) <= budget * 12]
        expected = min(sum(of[pick] for of, pick in zip(options, picks, strict=True)) for picks in within)
        choice = choose_active(losses, layouts(4, 3), budget)
        assert choice.heads["active_heads"] in within and choice.loss == pytest.approx(expected)
    with pytest.raises(ConversionError, match="--active 20%"):
        choose_active(losses, layouts(4, 3), 0.2)


def logits_and_output(model, layer, tokens):
    """Return the logarithms of the probabilities at every second position, and the output of a layer."""
    outputs = []
    with model.model.layers[layer].register_forward_hook(lambda *call: outputs.append(call[-1])), torch.no_grad():
        return model(tokens).logits[:, ::2].log_softmax(-1), *outputs


def test_active_trial_loss_equals_or_is_in_proportion_to_divergence_of_converted_model(text, tmp_path, monkeypatch):
    for module in (head_statistics, fitted_router):  # a conversion fits in the fastest dtype
        monkeypatch.setattr(module, "fast_dtype", lambda: torch.float32)
    monkeypatch.setattr(joint_fit, "MIN_DIVERGENCE", 100.0)
    folder = write_stock(tmp_path / "source")
    source, stock = open_source(folder, scratch=tmp_path), toys.STOCK["Llama"][0].from_pretrained(folder)
    tokens = Text(None).windows(source, 64, 3, stock.vocab_size)
    model = StreamedModel(source.store, stock)
    fitted = Text(text).calibration_batch(source, model, lambda *done: None)
    losses = measure_losses(model, [ActiveTrials(model, fitted)], tokens, lambda *done: None)
    assert losses.keys() == set(product(range(2), ("active",), (1, 2, 3)))
    plain = toys.STOCK["Llama"][1].from_pretrained(folder)
    divergences, changes = {}, {}
    for layer, side, count in losses:
        mixture = {"mixture": {"active_heads": count, "layers": [layer]}}
        crosshead.convert(folder, tmp_path / "out", mixture, verify=False, overwrite=True, calibration=text)
        made = crosshead.CrossheadLlamaForCausalLM.from_pretrained(tmp_path / "out")
        (logits, states), (wanted, source_states) = (logits_and_output(kind, layer, tokens) for kind in (made, plain))
        divergences[layer, side, count] = (wanted.exp() * (wanted - logits)).sum(-1).mean().item()
        changes[layer, side, count] = (states - source_states).square().mean().item()
    for (layer, side, count), loss in losses.items():
        scale = changes[layer, side, count] / changes[layer, side, 2]
        assert loss == pytest.approx(divergences[layer, side, 2] * scale, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("budgets", first([{"active": 0.75, "cache": "60%"}, {"active": "60%"}]), ids=str)
def test_active_budget_gives_same_weights_as_its_chosen_counts(budgets, text, tmp_path):
    """With and without a budget for the cache; a dry run chooses the same counts."""
    source = write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    options = {"calibration": text, "verify": False}
    planned = crosshead.convert(source, tmp_path / "out", {}, **budgets, **options, plan_only=True)
    report = crosshead.convert(source, tmp_path / "out", {}, **budgets, **options)
    chosen = report["chosen"]
    assert planned["chosen"] == chosen and chosen["expected_divergence"] > 0
    assert planned["calibration"] == report["calibration"] and report["calibration"]["text"] == text.name
    mixers = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True).mixers
    assert mixers["mixture"]["active_heads"] == chosen["active_heads"]
    assert ("explicit" in mixers) == ("cache" in budgets)
    assert sum(chosen["active_heads"]) / 16 == chosen["active"] <= 0.75
    crosshead.convert(source, tmp_path / "asked", mixers, **options)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "asked")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("mixers", "options", "named"),
    [
        ({"mixture": {"active_heads": 3}}, {}, "mixture.active_heads"),
        ({"mixture": {"shared_heads": 1}}, {}, "mixture.shared_heads"),
        ({"mixture": {"method": "paper"}}, {}, "method"),
        ({"knocking": {}}, {}, "'mixture'"),
        ({}, {"calibration": "saved.safetensors"}, r"--active fits routers to a text.*saved\.safetensors"),
        ({}, {"active": "0%"}, "--active 0%"),
        ({}, {"active": "most"}, "--active most"),
    ],
)
def test_invalid_active_budget_requests_are_refused(mixers, options, named, tmp_path):
    source = write_stock(tmp_path / "source")
    with pytest.raises(ConversionError, match=named):
        crosshead.convert(source, tmp_path / "out", mixers, **{"active": "75%"} | options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("budgets", "named"),
    [({"cache": "24%"}, "--cache 24%.* 25%"), ({"active": "12%"}, r"--active 12%.* 12\.5%")],
)
@pytest.mark.parametrize("plan_only", [False, True])
def test_too_small_budget_is_refused_before_measuring(budgets, named, plan_only, tmp_path):
    source = write_stock(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    stages = []
    with pytest.raises(ConversionError, match=named):
        crosshead.convert(
            source, tmp_path / "out", {}, **budgets, plan_only=plan_only, progress=lambda *done: stages.append(done)
        )
    assert not stages and [path.name for path in tmp_path.iterdir()] == ["source"]
