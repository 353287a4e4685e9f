import copy

import pytest
import torch

import toys
from crosshead.conversion.calibration import head_statistics
from crosshead.conversion.calibration.head_statistics import HeadStatistics
from crosshead.modeling.mechanisms.base import HeadLayout

D = toys.SIZES["head_dim"]


def layer_layout(backbone, config):
    eps = config.rms_norm_eps if backbone.startswith("Qwen3") else None
    return HeadLayout(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, D, key_norm_eps=eps)


def layer_and_input(backbone, length=12, **changes):
    model = toys.stock_model(backbone, **changes).double()
    hidden = torch.randn(2, length, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).double()
    positions = torch.arange(length).unsqueeze(0)
    cos, sin = (part.double() for part in model.model.rotary_emb(hidden, positions))
    return model.model.layers[0].self_attn, hidden, (cos, sin), layer_layout(backbone, model.config)


def observe_windows(attention, hidden, turn, layout):
    statistics = HeadStatistics(layout)
    for window in hidden.split(1):
        statistics.observe(attention, window, turn)
    return statistics


@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_statistics_of_windows_add_up(backbone):
    arguments = layer_and_input(backbone)
    whole, apart = HeadStatistics(arguments[3]), observe_windows(*arguments)
    whole.observe(*arguments[:3])
    for name, tensor in apart.sums.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(whole.sums[name], tensor, rtol=0, atol=0)
    again = HeadStatistics(arguments[3], apart.sums)
    assert again.sums.keys() == apart.sums.keys()


def rope_matrix(cos, sin):
    """Return the RoPE rotation at one position as a matrix: `rotated = matrix @ x`."""
    half = D // 2
    quarter = torch.zeros(D, D, dtype=torch.float64)
    quarter[:half, half:], quarter[half:, :half] = -torch.eye(half), torch.eye(half)
    return torch.diag(cos) + torch.diag(sin) @ quarter


def reference_attention(attention, hidden, cos, sin, changed=None):
    """Slow attention: return head outputs (T, heads, D), weights (heads, T, T) and values (T, KV heads, D).

    `changed` is (KV head, position, error): the error is added to this key before its norm.
    """
    length = hidden.shape[0]
    heads = attention.k_proj.weight.shape[0] // D
    group = attention.q_proj.weight.shape[0] // D // heads
    query = attention.q_proj(hidden).view(length, -1, D)
    key, value = (p(hidden).view(length, -1, D).clone() for p in (attention.k_proj, attention.v_proj))
    if changed is not None:
        key[changed[1], changed[0]] += changed[2]
    if hasattr(attention, "q_norm"):
        query, key = (norm.double()(x) for norm, x in ((attention.q_norm, query), (attention.k_norm, key)))
    turns = [rope_matrix(c, s) for c, s in zip(cos, sin, strict=True)]
    reach = getattr(attention, "sliding_window", None) or length
    weights = torch.zeros(heads * group, length, length, dtype=torch.float64)
    outputs = torch.zeros(length, heads * group, D, dtype=torch.float64)
    for head in range(heads * group):
        for t in range(length):
            visible = list(range(max(0, t - reach + 1), t + 1))
            moved = turns[t] @ query[t, head]
            scores = torch.stack([moved @ (turns[s] @ key[s, head // group]) for s in visible]) / D**0.5
            weights[head, t, visible] = scores.softmax(0)
            outputs[t, head] = weights[head, t] @ value[:, head // group]
    return outputs, weights, value


@pytest.mark.parametrize("backbone", ["Llama", "Qwen2"])
@pytest.mark.parametrize("sliding", [None, 5])
def test_value_statistics_match_reference_loop(backbone, sliding):
    attention, hidden, (cos, sin), layout = layer_and_input(backbone)
    attention.sliding_window = sliding
    with torch.no_grad():
        statistics = observe_windows(attention, hidden, (cos, sin), layout)
        gram = torch.zeros_like(statistics.sums["value.gram"])
        for window in hidden:
            _, weights, value = reference_attention(attention, window, cos[0], sin[0])
            features = value.flatten(1)
            if attention.v_proj.bias is not None:
                features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
            for head, of_head in enumerate(weights):
                for row in of_head:
                    average = row @ features
                    gram[head // 2, 0] += torch.outer(average, average)
    torch.testing.assert_close(statistics.sums["value.gram"], gram)
    blocks = attention.o_proj.weight.detach().view(-1, 2, 2, D)
    metric = torch.einsum("nhgd,nhge->hde", blocks, blocks) * 2 * hidden.shape[0] * hidden.shape[1]
    torch.testing.assert_close(statistics.sums["value.metric"][:, 0], metric)
    torch.testing.assert_close(
        statistics.sums["value.weight"][:, 0], torch.full((2,), 2.0 * hidden.shape[0] * hidden.shape[1]).double()
    )


@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_metric_of_first_key_matches_output_change(backbone):
    attention, hidden, (cos, sin), layout = layer_and_input(backbone)
    with torch.no_grad():
        statistics = observe_windows(attention, hidden, (cos, sin), layout)
        error = 1e-3 * torch.randn(D, generator=torch.Generator().manual_seed(5)).double()
        for head in range(2):
            cost = 0.0
            for window in hidden:
                before, _, _ = reference_attention(attention, window, cos[0], sin[0])
                key = attention.k_proj(window[:1]).view(-1, D)[head]
                scale = key.square().mean().add(layout.key_norm_eps).sqrt() if layout.key_norm_eps else 1.0
                after, _, _ = reference_attention(attention, window, cos[0], sin[0], (head, 0, error * scale))
                for query_head in (2 * head, 2 * head + 1):
                    readout = attention.o_proj.weight[:, query_head * D : (query_head + 1) * D]
                    cost += float(((after - before)[:, query_head] @ readout.T).square().sum()) * D
            estimate = float(error @ statistics.sums["key.metric"][head, 0] @ error)
            assert estimate == pytest.approx(cost, rel=1e-2)


def test_key_metric_estimate_converges_to_exact_value(monkeypatch):
    attention, hidden, turn, layout = layer_and_input("Llama")
    attention = copy.deepcopy(attention)
    mean = HeadStatistics(layout)
    for _ in range(400):
        mean.observe(attention, hidden[:1], turn)
    exact = torch.zeros(D, D, dtype=torch.float64)
    with torch.no_grad():
        outputs, weights, value = reference_attention(attention, hidden[0], turn[0][0], turn[1][0])
        for head in (0, 1):
            readout = attention.o_proj.weight[:, head * D : (head + 1) * D]
            for t in range(12):
                for s in range(1, t - head_statistics.NEAR + 1):
                    query_turn, key_turn = (rope_matrix(turn[0][0, x], turn[1][0, x]) for x in (t, s))
                    query = attention.q_proj(hidden[0, t]).view(-1, D)[head]
                    change = (value[s, 0] - outputs[t, head]) @ readout.T
                    move = (key_turn.T @ query_turn @ query) * weights[head, t, s] * change.norm()
                    exact += torch.outer(move, move)
    estimate = mean.sums["key.metric"][0, 1] / 400
    assert float((estimate - exact).norm() / exact.norm()) < 0.15


def test_long_windows_use_sampled_queries(monkeypatch):
    arguments = layer_and_input("Llama")
    monkeypatch.setattr(head_statistics, "QUERIES", 4)
    statistics = observe_windows(*arguments)
    assert float(statistics.sums["value.weight"][0, 0]) == 2 * 2 * 4
    assert all(torch.isfinite(tensor).all() for tensor in statistics.sums.values())
