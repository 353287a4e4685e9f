"""The output projection that is fitted to compressed heads: least squares by the book, and better than none."""

import pytest
import torch

import toys
from crosshead.conversion.calibration import head_statistics as fast_arithmetic
from crosshead.conversion.compress import fitted_output
from crosshead.conversion.compress.fitted_output import MAX_WINDOWS, RIDGE, AttentionCalls, output_change
from crosshead.conversion.compress.layer_rewrites import substituted


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Where the arithmetic is fast, it rounds."""
    for module in (fast_arithmetic, fitted_output):
        monkeypatch.setattr(module, "fast_dtype", lambda: torch.float32)


def heads_and_outputs(attention, calls):
    """What the output projection reads and gives, of all tokens."""
    heads = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, given: heads.append(given[0]))
    outputs = [attention(hidden_states=given, **calls.arguments)[0] for given in calls.inputs]
    handle.remove()
    return [torch.cat(parts).flatten(0, 1).double() for parts in (heads, outputs)]


@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
@torch.no_grad()
def test_it_is_the_least_squares_solution(backbone):
    model, calls = toys.stock_model(backbone).eval(), AttentionCalls(3)
    attention = model.model.layers[1].self_attn
    handle = attention.register_forward_hook(calls, with_kwargs=True)
    for seed in range(3):
        model(toys.tokens(batch=1, length=30, seed=seed), use_cache=False)
    handle.remove()
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    compressed = {
        name: before[name] + 0.1 * torch.randn_like(before[name]) for name in ("k_proj.weight", "v_proj.weight")
    }
    wanted = heads_and_outputs(attention, calls)[1]
    change = output_change(attention, calls, compressed).double()
    assert all(torch.equal(before[name], tensor) for name, tensor in attention.state_dict().items())
    assert not attention.o_proj._forward_pre_hooks
    with substituted(attention, compressed):
        heads, found = heads_and_outputs(attention, calls)
    ridge = (RIDGE * heads.square().sum(0).mean()).sqrt()
    rows = torch.cat([heads, ridge * torch.eye(heads.shape[1]).double()])
    missing = torch.cat([wanted - found, torch.zeros(heads.shape[1], wanted.shape[1]).double()])
    expected = torch.linalg.lstsq(rows, missing).solution.T
    torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-5)
    left = wanted - found - heads @ change.T
    assert left.square().sum() < 0.95 * (wanted - found).square().sum()


@torch.no_grad()
def test_nothing_to_add_where_nothing_changed():
    model, calls = toys.stock_model("Llama").eval(), AttentionCalls(1)
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(calls, with_kwargs=True)
    model(toys.tokens(batch=1, length=30), use_cache=False)
    attention._forward_hooks.clear()
    assert not output_change(attention, calls, {}).any()


def test_no_more_is_kept_than_is_read():
    calls = AttentionCalls(2 * MAX_WINDOWS + 1)
    for index in range(calls.calls):
        calls(None, (), {"hidden_states": torch.full((1, 1, 1), float(index))}, (torch.ones(1),))
    assert [int(given) for given in calls.inputs] == list(range(0, calls.calls, 3))
    assert len(calls.outputs) == len(calls.inputs) <= MAX_WINDOWS
