"""Recorded states of attention layers match the forward pass; measures match their definitions as loops."""

import math

import pytest
import torch

import toys
from crosshead.evals.inspect.backbones import BACKBONES
from crosshead.evals.inspect.layer import (
    layer_record,
    map_measures,
    mean_of_pairs,
    output_similarity,
    output_weights,
    pattern_similarity,
    record_states,
    value_norms,
)
from crosshead.evals.inspect.matrices import downsample, learnt_matrices, matrix_records
from crosshead.evals.inspect.pack import pack_indices, pack_maps, pack_numbers, plain, rounded
from packed import maps, numbers, unpack
from tiers import grid

LENGTH = 9
POSITIONS = torch.arange(9.0).unsqueeze(1)
CASES = {"stock": {}, **toys.CASES}


def random_maps(heads=3, size=7, seed=0):
    logits = torch.randn(heads, size, size, generator=torch.Generator().manual_seed(seed))
    hidden = torch.ones(size, size).triu(1).bool()
    return logits.mul(2).masked_fill(hidden, -torch.inf).softmax(-1)


def record(backbone, mixers):
    """Return a model, its tokens and the recorded LayerStates of each layer."""
    model = toys.mixed_model(backbone, mixers) if mixers else toys.stock_model(backbone)
    tokens, states = toys.tokens(1, LENGTH), []
    for layer in model.model.layers:
        before = dict(layer.self_attn.named_modules())
        with torch.no_grad(), record_states(layer.self_attn, BACKBONES["llama"], states.append):
            watched = model(tokens).logits
        assert dict(layer.self_attn.named_modules()) == before
    with torch.no_grad():
        assert torch.equal(watched, model(tokens).logits)
    return model, tokens, states


@pytest.mark.parametrize(("backbone", "case"), grid(toys.BACKBONES, CASES, strength=1))
def test_recorded_states_match_forward_pass(backbone, case):
    model, tokens, states = record(backbone, CASES[case])
    inputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        outputs = model(tokens, output_attentions=True)
    for hook in hooks:
        hook.remove()
    assert len(states) == len(outputs.attentions) == 2
    for layer, recording in enumerate(states):
        assert torch.equal(recording.weights, outputs.attentions[layer][0])
        assert torch.equal(recording.head_outputs.flatten(1), inputs[layer])
        mixers = getattr(model.model.layers[layer].self_attn, "mixers", {})
        weights = output_weights(recording.weights, recording.subtracted)
        expected = torch.nn.functional.normalize(expected_head_outputs(weights, recording), dim=-1)
        # Compare directions only: differential attention normalises the head outputs afterwards.
        assert torch.allclose(expected, torch.nn.functional.normalize(recording.attention_outputs, dim=-1), atol=1e-5)
        routes = "mixture" in mixers
        assert (recording.routing is not None) == routes
        if routes:
            gates, probabilities = recording.routing
            assert torch.allclose(probabilities.sum(-1), torch.ones(LENGTH))
            assert (gates != 0).sum(-1).tolist() == [mixers["mixture"].settings["active_heads"]] * LENGTH


def expected_head_outputs(weights, recorded):
    """Return head outputs (T, heads, features), computed head by head from weights and values."""
    features = recorded.attention_outputs.shape[-1]
    values = recorded.values
    if features != values.shape[-1]:  # differential: the values of a pair of heads, concatenated
        values = torch.cat([values[0::2], values[1::2]], dim=-1)
    group = len(weights) // len(values)
    return torch.stack([weights[head] @ values[head // group] for head in range(len(weights))], dim=1)


def test_head_similarities_match_paper_definition():
    weights, outputs = random_maps(), torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(1))
    patterns, cosines = pattern_similarity(weights), output_similarity(outputs)
    for i in range(3):
        for j in range(3):
            distances = [float((weights[i, t] - weights[j, t]).abs().sum()) for t in range(7)]
            assert patterns[i, j] == pytest.approx(1 - sum(distances) / 7 / 2, abs=1e-6)
            cosine_values = [
                float(outputs[t, i] @ outputs[t, j] / outputs[t, i].norm() / outputs[t, j].norm()) for t in range(7)
            ]
            assert cosines[i, j] == pytest.approx(sum(cosine_values) / 7, abs=1e-6)
    pairs = [float(patterns[i, j]) for i in range(3) for j in range(3) if i != j]
    assert mean_of_pairs(patterns) == pytest.approx(sum(pairs) / 6, abs=1e-5)
    assert mean_of_pairs(patterns[:1, :1]) is None


def test_map_measures_match_definitions():
    weights = random_maps()
    measures = map_measures(weights, POSITIONS[:7], causal=True)
    for head in range(3):
        rows = weights[head].tolist()
        expected = {
            "first": sum(rows[t][0] for t in range(1, 7)) / 6,
            "previous": sum(rows[t][t - 1] for t in range(1, 7)) / 6,
            "own": sum(rows[t][t] for t in range(7)) / 7,
            "distance": sum(rows[t][s] * (t - s) for t in range(7) for s in range(t + 1)) / 7,
            "entropy": -sum(p * math.log2(p) for row in rows for p in row if p) / 7,
        }
        assert {name: float(each[head]) for name, each in measures.items()} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("signed", [False, True])
def test_packed_maps_keep_precision_and_sign(signed):
    weights = random_maps()
    if signed:
        weights = 3 * weights - 2 * random_maps(seed=5)
    packed = pack_maps(weights)
    scale = packed["scale"]
    assert scale == (pytest.approx(float(weights.abs().max())) if signed else 1.0)
    read = maps(packed) / scale
    roots = weights.double().abs().div(scale).sqrt() * weights.sign()
    assert torch.allclose(read.abs().sqrt() * read.sign(), roots, atol=0.5 / 127 + 1e-6)


def test_packed_numbers_and_indices_round_trip():
    values = torch.tensor([[0.5, -2.0, 0.0], [1e-5, 2.0, 1.25]])
    assert torch.allclose(numbers(pack_numbers(values)), values.double(), atol=2 / 32767)
    assert numbers(pack_numbers(torch.zeros(2, 2))).tolist() == [[0, 0], [0, 0]]
    assert numbers(pack_indices(torch.tensor([-1, 511]))).tolist() == [-1, 511]
    assert plain(torch.tensor([[1 / 3, torch.nan]])) == [[0.33333, None]]
    assert rounded(math.inf) is None


@pytest.mark.parametrize("case", ["stock", "explicit", "differential"])
def test_value_and_output_norms_of_heads(case):
    _, _, states = record("Llama", CASES[case])
    recorded = states[1]
    values = list(recorded.values)
    if case == "differential":
        values = [torch.cat([values[0], values[1]], dim=-1)]
    norms = torch.stack([value.square().sum(-1).sqrt() for value in values])
    assert torch.allclose(value_norms(recorded), norms)
    layer = layer_record(recorded, POSITIONS, causal=True)
    assert layer["measures"]["value_norm"] == pytest.approx(norms.mean(-1).tolist(), rel=1e-4)
    outputs = recorded.head_outputs.square().sum(-1).sqrt()
    assert layer["measures"]["output_norm"] == pytest.approx(outputs.mean(0).tolist(), rel=1e-4)
    assert torch.allclose(numbers(layer["output_norms"]).float(), outputs.T, atol=1e-3 * float(outputs.max()))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_top_weights_match_attention_maps(case):
    states = record("Llama", CASES[case])[2]
    layer = layer_record(states[1], POSITIONS, causal=True)
    shown = list(output_weights(states[1].weights, states[1].subtracted))
    if len(layer["labels"]) > len(shown):
        shown += list(states[1].weights)
    assert len(layer["labels"]) == len(shown)
    for side, turn in (("keys", False), ("queries", True)):
        indices, sizes = unpack(layer[side]["index"]), numbers(layer[side]["weight"])
        indices = indices.reshape(layer[side]["index"]["shape"])
        for head, each in enumerate(shown):
            for token, row in enumerate((each.T if turn else each).tolist()):
                expected = sorted(range(LENGTH), key=lambda index: -abs(row[index]))[:5]
                expected = [index if row[index] else -1 for index in expected]
                assert indices[head, token].tolist() == expected
                assert sizes[head, token].tolist() == pytest.approx(
                    [row[index] if index >= 0 else 0 for index in expected], abs=1e-3
                )


def test_learnt_matrices_of_mechanisms():
    talking = toys.mixed_model("Llama", {"talking": {}}).model.layers[1].self_attn.mixers["talking"]
    records = {record["name"]: record for record in matrix_records("decoder", [1], "talking", talking)}
    assert list(records) == ["logits", "weights", "weights x logits"]
    product = talking.weights.weight.detach() @ talking.logits.weight.detach()
    assert torch.allclose(shown(records["weights x logits"]).float(), product, atol=1e-3)
    alone = toys.mixed_model("Llama", {"talking": {"on": ["logits"]}}).model.layers[0].self_attn.mixers["talking"]
    assert list(learnt_matrices(alone)) == ["logits"]
    differential = toys.mixed_model("Llama", {"differential": {}}).model.layers[1].self_attn.mixers["differential"]
    grouped = toys.mixed_model("Llama", {"explicit": {"groups": 2}}).model.layers[0].self_attn.mixers["explicit"]
    assert torch.equal(learnt_matrices(grouped)["value"], grouped.value.weight.detach().flatten().diag())
    (record,) = matrix_records("decoder", [1], "differential", differential)
    assert shown(record).item() == pytest.approx(differential(differential.lambda_q1).item(), rel=1e-4)


@pytest.mark.parametrize("case", toys.MECHANISM_CASES)
def test_matrix_records_include_every_mechanism_matrix(case):
    mixer = toys.mixed_model("Qwen3", toys.MECHANISM_CASES[case]).model.layers[0].self_attn.mixers[case]
    matrices = {name: parameter for name, parameter in mixer.named_parameters() if parameter.ndim == 2}
    records = {record["name"]: record for record in matrix_records("decoder", [0], case, mixer)}
    assert {name.removesuffix(".weight") for name in matrices} <= set(records)
    for name, matrix in matrices.items():
        assert torch.allclose(shown(records[name.removesuffix(".weight")]).float(), matrix.detach(), atol=1e-3)


def shown(record):
    read = numbers(record["values"])
    return read + torch.eye(len(read)) if record["plus_identity"] else read


def test_only_matrices_near_identity_are_stored_as_difference():
    knocking = toys.mixed_model("Llama", {"knocking": {}})
    with torch.no_grad():
        mixer = knocking.model.layers[0].self_attn.mixers["knocking"]
        mixer.value.up.weight.copy_(torch.eye(8) + 0.01)
        mixer.value.gate.weight.fill_(0.01)
    plus_identity = {
        record["name"]: record["plus_identity"] for record in matrix_records("decoder", [0], "knocking", mixer)
    }
    assert plus_identity["value.up"] and not plus_identity["value.gate"]


def test_downsample_takes_root_mean_square_of_blocks():
    matrix = torch.arange(3 * 600.0).reshape(3, 600).sin()
    drawn = downsample(matrix)
    assert drawn.shape == (3, 200)
    for row in range(3):
        for block in range(200):
            part = matrix[row, 3 * block : 3 * block + 3]
            assert drawn[row, block] == pytest.approx(float(part.square().mean().sqrt()), abs=1e-5)
    assert downsample(matrix[:, :257]).shape == (3, 129)
    assert float(downsample(matrix[:, :257])[0, -1]) == pytest.approx(abs(float(matrix[0, 256])), abs=1e-5)
    assert torch.equal(downsample(matrix[:, :256]), matrix[:, :256])
