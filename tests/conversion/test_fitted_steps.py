"""Gradient steps after the closed-form fit change only the named tensors and never raise the attention's error."""

import pytest
import torch
from torch.func import functional_call

import toys
from crosshead.conversion.calibration.head_statistics import HeadStatistics
from crosshead.conversion.compress import fitted_steps
from crosshead.conversion.compress.component_heads import ComponentHeads
from crosshead.conversion.compress.fitted_output import AttentionCalls
from crosshead.conversion.compress.fitted_steps import fit_by_steps, solve_layer
from crosshead.conversion.compress.head_groups import Counts
from crosshead.conversion.compress.layer_rewrites import as_stock

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}
BACKBONES = ["Llama", "Qwen2", "Qwen3"]


def record_attention(backbone, drift=0.05):
    """Return an attention, its statistics and calls on three windows, converted inputs, and states after attention."""
    model = toys.stock_model(backbone, **SIZES).eval()
    layout = toys.mixed_config(backbone, {}, **SIZES).layouts()[1]
    layer, windows = model.model.layers[1], toys.tokens(batch=3, length=30)
    statistics, after = HeadStatistics(layout), []

    def observe(attention, args, inputs):
        statistics.observe(attention, inputs["hidden_states"], inputs["position_embeddings"])

    with torch.no_grad():
        states = model(windows, use_cache=False, output_hidden_states=True).hidden_states[1]
        generator = torch.Generator().manual_seed(0)
        converted = states + drift * torch.randn(states.shape, generator=generator)
        calls = AttentionCalls(layer.input_layernorm, states, converted)
        attention = layer.self_attn
        handles = [
            attention.register_forward_pre_hook(observe, with_kwargs=True),
            attention.register_forward_hook(calls, with_kwargs=True),
            layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: after.append(args[0])),
        ]
        for window in windows.split(1):
            model(window, use_cache=False)
    for handle in handles:
        handle.remove()
    return attention, statistics, calls, converted, after


def attention_error(attention, tensors, calls, converted, after):
    """Return the mean squared error of the states after attention, relative to the squared norm of the source's."""
    errors = []
    for index, target in enumerate(after):
        arguments = {"hidden_states": calls.inputs[index].float(), **calls.arguments}
        with torch.no_grad():
            output = functional_call(attention, tensors, (), arguments)[0]
        relative = (converted[index] + output - target).square().sum(-1) / target.square().sum(-1)
        errors.append(float(relative.mean()))
    return sum(errors) / len(errors)


@pytest.mark.parametrize("counts", [Counts(2, 2), Counts(4, 2), Counts(2, 4, 2, True)], ids=["both", "values", "keys"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_steps_reduce_error_and_calibration_stores_fitted_tensors(backbone, counts):
    attention, statistics, calls, converted, after = record_attention(backbone)
    layout, source = statistics.layout, {name: t.clone() for name, t in attention.state_dict().items()}
    heads, stock = ComponentHeads(layout, counts), solve_layer(attention, statistics, calls, counts)
    assert all(torch.equal(source[name], tensor) for name, tensor in attention.state_dict().items())
    assert {name: tuple(statistics.sums[name].shape) for name in statistics.sums if name.startswith("fitted")} == {
        name: shape for name, shape in heads.shapes_of_fitted(backbone == "Qwen2").items() if name.startswith("fitted")
    }
    stored = HeadStatistics(layout, statistics.sums)
    new = heads.rewrite(source, stored)
    torch.testing.assert_close(as_stock(new, counts.groups), stock)
    start = {name: tensor for name, tensor in statistics.sums.items() if not name.startswith("fitted")}
    before = heads.rewrite(source, HeadStatistics(layout, start))
    closed = heads.approximate(source, HeadStatistics(layout, start))
    unchanged = {f"{side[0]}_proj.weight" for side, count in counts.sides.items() if count == layout.key_value_heads}
    assert all(torch.equal(new[name], before[name]) for name in unchanged)
    measured = (calls, converted, after)
    start_error = attention_error(attention, as_stock(before, counts.groups), *measured)
    assert attention_error(attention, closed, *measured) == pytest.approx(start_error, rel=1e-3)
    assert attention_error(attention, stock, *measured) < 0.99 * start_error


@pytest.mark.parametrize("backbone", BACKBONES)
def test_solve_layer_as_written_returns_written_output_projection(backbone, monkeypatch):
    """Without steps, `as_written=False` returns the same head outputs in the source's own basis."""
    monkeypatch.setattr(fitted_steps, "STEPS", 0)
    counts, tensors_of = Counts(2, 2), {}
    for as_written in (False, True):
        attention, statistics, calls, converted, after = record_attention(backbone)
        tensors_of[as_written] = solve_layer(attention, statistics, calls, counts, as_written)
    new = ComponentHeads(statistics.layout, counts).rewrite(attention.state_dict(), statistics)
    assert torch.equal(tensors_of[True]["o_proj.weight"], new["o_proj.weight"])
    assert not torch.allclose(tensors_of[False]["o_proj.weight"], new["o_proj.weight"], rtol=0.01)
    errors = [attention_error(attention, tensors, calls, converted, after) for tensors in tensors_of.values()]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_steps_change_only_named_tensors_deterministically(backbone):
    attention, statistics, calls, *_ = record_attention(backbone)
    tensors = ComponentHeads(statistics.layout, Counts(2, 3)).rewrite(attention.state_dict(), statistics)
    parts = ComponentHeads(statistics.layout, Counts(2, 3)).fitted_parts()
    first, second = (fit_by_steps(attention, calls, tensors, parts, 1) for _ in range(2))
    assert first.keys() == tensors.keys() & {*parts}
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert not torch.equal(tensor, tensors[name].float())


@pytest.mark.parametrize("rate", [100.0, float("nan")])
def test_steps_that_raise_error_are_undone(rate, monkeypatch):
    monkeypatch.setattr(fitted_steps, "RATE", rate)
    attention, statistics, calls, *_ = record_attention("Llama")
    tensors = ComponentHeads(statistics.layout, Counts(2, 2)).rewrite(attention.state_dict(), statistics)
    parts = ComponentHeads(statistics.layout, Counts(2, 2)).fitted_parts()
    fitted = fit_by_steps(attention, calls, tensors, parts, 1)
    assert all(torch.equal(tensor, tensors[name].float()) for name, tensor in fitted.items())


def test_steps_are_skipped_below_minimum_error(monkeypatch):
    attention, statistics, calls, *_ = record_attention("Llama")
    monkeypatch.setattr(fitted_steps, "MIN_ERROR", 10.0)
    counts = Counts(2, 2)
    tensors = ComponentHeads(statistics.layout, counts).rewrite(attention.state_dict(), statistics)
    fitted = fit_by_steps(attention, calls, tensors, ComponentHeads(statistics.layout, counts).fitted_parts(), 1)
    assert all(torch.equal(tensor, tensors[name].float()) for name, tensor in fitted.items())
