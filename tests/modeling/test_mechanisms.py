"""Mechanisms outside a decoder: applied to tensors, without a mask, in cross-attention; compared with DiffLlama."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import oracle_arithmetic
import oracles
from crosshead.modeling.configuration import complete_mixers, layer_settings, shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout
from crosshead.modeling.ops import HeadRMSNorm, apply_mask, head_map_init, rms_normalised
from toys import lopsided, mixed_model, tokens

LAYOUT = HeadLayout(hidden_size=12, query_heads=4, key_value_heads=2, head_dim=6)


def build_mechanism(name: str, options: dict[str, Any], layout: HeadLayout = LAYOUT) -> Any:
    """Return a mechanism module by itself, in float64."""
    settings = layer_settings(complete_mixers({name: options}, [layout]), 0)
    return lopsided(MECHANISMS[name](shared_layout(settings, layout), settings[name])).double()


def random_state(queries: int = 3, keys: int = 5) -> AttentionState:
    """Return a random attention state with queries from one sequence, keys and values from another."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return AttentionState(
        hidden_states=draw(2, queries, 12),
        key_value_input=draw(2, keys, 12),
        query=draw(2, 4, queries, 6),
        key=draw(2, 2, keys, 6),
        value=draw(2, 2, keys, 6),
    )


def test_talking_cross_attention_without_mask_follows_the_oracle() -> None:
    talking = build_mechanism("talking", {"dynamic": ["query_logits", "key_weights"], "softmax_heads": 3})
    state = random_state()
    talking.before_rope(state)
    attend = ALL_ATTENTION_FUNCTIONS[talking.attention_function(state, "eager", masked=False)]
    qkv = state.query, state.key, state.value
    output, weights = attend(talking, *qkv, None, scaling=6**-0.5, **state.attention_kwargs)
    named = {f"mixers.talking.{name}": parameter for name, parameter in talking.named_parameters()}
    mixers = {"talking": talking.settings}
    shape = oracle_arithmetic.LayerShape(4, 2, 6, 0, 1e-6, False)
    for b in range(2):
        heads = {
            side: [[getattr(state, side)[b, head, t] for head in range(count)] for t in range(length)]
            for side, count, length in (("query", 4, 3), ("key", 2, 5), ("value", 2, 5))
        }
        both = torch.cat([state.hidden_states[b], state.key_value_input[b]])  # queries come first, then keys
        for t in range(3):
            row = []
            for s in range(5):
                logits = [heads["query"][t][h] @ heads["key"][s][h // 2] / math.sqrt(6) for h in range(4)]
                row.append(oracles.talking(logits, "logits", both[t], both[3 + s], named, talking.settings))
            soft = [torch.softmax(torch.stack([cell[h] for cell in row]), 0) for h in range(3)]
            mixed = [
                oracles.talking(
                    [soft[h][s] for h in range(3)], "weights", both[t], both[3 + s], named, mixers["talking"]
                )
                for s in range(5)
            ]
            for head in range(shape.query_heads):
                expected = sum(mixed[s][head] * heads["value"][s][head // 2] for s in range(5))
                assert (output[b, t, head] - expected).abs().max() < 1e-12
                assert (weights[b, head, t] - torch.stack([mixed[s][head] for s in range(5)])).abs().max() < 1e-12


def test_explicit_and_knocking_apply_to_cross_attention() -> None:
    state = random_state()
    explicit = build_mechanism("explicit", {"norm": False})
    raw = state.key
    explicit.before_rope(state)
    explicit.after_cache(state)
    weight = explicit.key.weight
    assert torch.allclose(state.key[:, 1], weight[1, 0] * raw[:, 0] + weight[1, 1] * raw[:, 1])
    knocking = build_mechanism("knocking", {"on": ["query"], "form": "linear"})
    query = state.query
    knocking.before_rope(state)
    assert torch.allclose(state.query, query @ knocking.query.weight.T)


def test_mixture_routes_queries_only() -> None:
    mixture = build_mechanism("mixture", {"active_heads": 3, "shared_heads": 1})
    state = random_state()
    mixture.before_rope(state)
    assert state.gates is not None and state.gates.shape == (2, 3, 4)
    output = torch.ones(2, 3, 4, 6, dtype=torch.float64)
    assert torch.equal(mixture.head_outputs(output, state)[..., 0], state.gates)
    assert (state.gates == 0).sum() == 2 * 3


def test_unit_gate_scale_gives_mean_gate_of_one() -> None:
    """The mean gate of the shared head is `2 a1`, that of the selected routed heads is `2 a2`, with a1 + a2 = 1."""
    mixture, inputs = build_mechanism("mixture", {"active_heads": 3, "shared_heads": 1}), random_state().hidden_states
    gates, probabilities = mixture(inputs, random_state().query)
    torch.testing.assert_close(probabilities, torch.softmax(inputs @ mixture.routed.weight.T, dim=-1))
    a1, a2 = torch.softmax(inputs @ mixture.balance.weight.T, dim=-1).split(1, dim=-1)
    selected = probabilities * (probabilities > probabilities.amin(-1, keepdim=True))  # two of three
    routed = 2 * a2 * selected / (selected.sum(-1, keepdim=True) / 2)
    torch.testing.assert_close(gates, torch.cat([2 * a1, routed], dim=-1))
    even = build_mechanism("mixture", {"active_heads": 4, "shared_heads": 2})
    with torch.no_grad():
        for parameter in even.parameters():
            parameter.zero_()
    gates, _ = even(random_state().hidden_states, random_state().query)
    assert torch.allclose(gates, torch.ones_like(gates))


def test_query_norm_router_is_finite_for_equal_norms() -> None:
    mixture = build_mechanism("mixture", {"active_heads": 2, "shared_heads": 1, "router": "query_norm"})
    query = torch.zeros(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    gates, probabilities = mixture(random_state().hidden_states[:1, :2], query)
    (gates.sum() + probabilities.pow(2).sum()).backward()
    assert gates.isfinite().all() and query.grad is not None and query.grad.isfinite().all()


@pytest.mark.parametrize("heads", ((4, 4), (8, 4), (4, 2)))
@torch.no_grad()
def test_differential_equals_diffllama(heads: tuple[int, int]) -> None:
    """DiffLlama pairs head i with head i + H/2, crosshead pairs adjacent heads; otherwise both are the same."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    ours = mixed_model("Llama", {"differential": {}}, hidden_size=32, **sizes)
    shared = {
        name: getattr(ours.config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")
    }
    theirs = DiffLlamaForCausalLM(
        DiffLlamaConfig(**shared, **sizes, num_hidden_layers=2, rope_parameters=ours.config.rope_parameters)
    ).eval()
    weights = {}
    for name, tensor in ours.state_dict().items():
        count = {"q_proj": heads[0], "k_proj": heads[1], "v_proj": heads[1]}.get(name.split(".")[-2], 0)
        if count:
            by_head = tensor.unflatten(0, (count, -1))
            tensor = torch.cat([by_head[0::2], by_head[1::2]]).flatten(0, 1)
        weights[name.replace("mixers.differential.", "")] = tensor
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and all("groupnorm" in name for name in missing)
    assert (ours(tokens()).logits - theirs(tokens()).logits).abs().max() < 1e-5


FIRST_VERSION = {"version": 1, "norm": True, "half_values": False}


def test_lambda_init_follows_paper_formula() -> None:
    """The paper's formula counts layers from 1, `layer_index` from 0."""
    for index in (0, 3):
        layout = shared_layout({"differential": FIRST_VERSION}, replace(LAYOUT, layer_index=index))
        start = MECHANISMS["differential"](layout, FIRST_VERSION).lambda_init
        assert start == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * (index + 1 - 1)))


@pytest.mark.parametrize(("rows", "columns"), ((4, 4), (6, 4), (4, 6), (3, 1), (1, 3), (5, 2)))
def test_head_map_init_round_trip_is_identity(rows: int, columns: int) -> None:
    forth, back = (head_map_init(torch.empty(*shape)) for shape in ((rows, columns), (columns, rows)))
    few = min(rows, columns)
    round_trip = back @ forth if columns == few else forth @ back
    assert torch.allclose(round_trip, torch.eye(few, dtype=torch.float64))


def test_norms_keep_float64_and_masks_stay_finite_in_float16() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    assert rms_normalised(x, 1e-6).dtype == torch.float64
    assert HeadRMSNorm(3, 1e-6).double()(x).dtype == torch.float64
    lowest = torch.full((1, 1, 1, 2), torch.finfo(torch.float16).min, dtype=torch.float16)
    masked = apply_mask(torch.full((1, 1, 1, 2), -60.0, dtype=torch.float16), lowest)
    assert torch.softmax(masked, -1).isfinite().all()
    boolean = apply_mask(torch.zeros(1, 1, 1, 2), torch.tensor([[[[True, False]]]]))
    assert torch.softmax(boolean, -1).tolist() == [[[[1.0, 0.0]]]]
