"""The output projection fitted to compressed heads is the least-squares solution and reduces the error."""

import pytest
import torch

import toys
from crosshead.conversion.calibration import head_statistics as fast_arithmetic
from crosshead.conversion.compress import fitted_output
from crosshead.conversion.compress.fitted_output import MAX_TOKENS, RIDGE, AttentionCalls, output_change
from crosshead.conversion.compress.layer_rewrites import substituted


@pytest.fixture(autouse=True)
def fit_in_float32(monkeypatch):
    """Fit in float32, since the fast dtype rounds."""
    for module in (fast_arithmetic, fitted_output):
        monkeypatch.setattr(module, "fast_dtype", lambda: torch.float32)


def record_attention(backbone, drift):
    """Return an attention, its calls on three windows, and target outputs; converted states have noise of `drift`."""
    model = toys.stock_model(backbone).eval()
    layer, windows = model.model.layers[1], toys.tokens(batch=3, length=30)
    states = model(windows, use_cache=False, output_hidden_states=True).hidden_states[1]
    converted = states + drift * torch.randn_like(states)
    calls = AttentionCalls(layer.input_layernorm, states, converted)
    handle = layer.self_attn.register_forward_hook(calls, with_kwargs=True)
    for window in windows.split(1):
        model(window, use_cache=False)
    handle.remove()
    inputs = [layer.input_layernorm(window) for window in states.split(1)]
    target = heads_and_outputs(layer.self_attn, inputs, calls.arguments)[1] + (states - converted).flatten(0, 1)
    return layer.self_attn, calls, target


def heads_and_outputs(attention, inputs, arguments):
    """Return the inputs of the output projection and the attention's outputs, both (tokens, features)."""
    heads = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    outputs = [attention(hidden_states=hidden, **arguments)[0] for hidden in inputs]
    handle.remove()
    return [torch.cat(parts).flatten(0, 1).double() for parts in (heads, outputs)]


@pytest.mark.parametrize("drift", [0.0, 0.1])
@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
@torch.no_grad()
def test_output_change_is_ridge_least_squares_solution(backbone, drift):
    attention, calls, target = record_attention(backbone, drift)
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    compressed = {
        name: before[name] + 0.1 * torch.randn_like(before[name]) for name in ("k_proj.weight", "v_proj.weight")
    }
    change = output_change(attention, calls, compressed).double()
    assert all(torch.equal(before[name], tensor) for name, tensor in attention.state_dict().items())
    assert not attention.o_proj._forward_pre_hooks
    with substituted(attention, compressed):
        heads, outputs = heads_and_outputs(attention, calls.inputs, calls.arguments)
    ridge = (RIDGE * heads.square().sum(0).mean()).sqrt()
    rows = torch.cat([heads, ridge * torch.eye(heads.shape[1]).double()])
    residual = torch.cat([target - outputs, torch.zeros(heads.shape[1], target.shape[1]).double()])
    expected = torch.linalg.lstsq(rows, residual).solution.T
    torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-5)
    left = target - outputs - heads @ change.T
    assert left.square().sum() < 0.95 * (target - outputs).square().sum()


@torch.no_grad()
def test_output_change_is_zero_without_compression():
    attention, calls, _ = record_attention("Llama", 0.0)
    assert output_change(attention, calls, {}).abs().max() < 1e-6


def test_attention_calls_keep_at_most_max_tokens():
    windows = torch.arange(65.0)[:, None, None].expand(-1, 1024, 1)
    calls = AttentionCalls(torch.nn.Identity(), windows, windows)
    for window in windows.split(1):
        calls(None, (), {"hidden_states": window}, (2 * window,))
    assert [int(hidden[0, 0]) for hidden in calls.inputs] == list(range(0, len(windows), 3))
    assert [int(output[0, 0]) for output in calls.outputs] == list(range(0, 2 * len(windows), 6))
    assert sum(output.shape[1] for output in calls.outputs) <= MAX_TOKENS
