from dataclasses import replace

import pytest
import torch

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.head_statistics import KINDS, HeadStatistics
from crosshead.conversion.compress import aligned_maps as aligned_keys
from crosshead.conversion.compress.component_heads import FRAME, ComponentHeads
from crosshead.conversion.compress.head_groups import Counts
from crosshead.conversion.compress.reorder_heads import reorder
from tiers import grid

D, HEADS = toys.SIZES["head_dim"], 4
SIZES = {"num_attention_heads": 8, "num_key_value_heads": HEADS, "hidden_size": 32}
PREFIX = "model.layers.{}.self_attn."


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Few fitting steps: no test here depends on the quality of the fit."""
    for name in ("KEY_STEPS", "VALUE_STEPS"):
        monkeypatch.setattr(aligned_keys, name, 8)


def toy_model(backbone, **changes):
    return toys.stock_model(backbone, **(SIZES | changes)).double()


def layouts(model):
    config = toys.mixed_config(backbone_of(model), {}, **SIZES)
    return config.layouts()


def backbone_of(model):
    return type(model).__name__.removesuffix("ForCausalLM")


def layer_tensors(model, layer):
    prefix = PREFIX.format(layer)
    return {name.removeprefix(prefix): t for name, t in model.state_dict().items() if name.startswith(prefix)}


def calibration_statistics(model, length=40):
    """Return the calibration statistics of every layer."""
    statistics = [HeadStatistics(layout) for layout in layouts(model)]
    for layer, layer_statistics in zip(model.model.layers, statistics, strict=True):

        def observe(attention, args, inputs, layer_statistics=layer_statistics):
            layer_statistics.observe(attention, inputs["hidden_states"], inputs["position_embeddings"])

        layer.self_attn.register_forward_pre_hook(observe, with_kwargs=True)
    with torch.no_grad():
        model(toys.tokens(batch=3, length=length, seed=7))
    for layer in model.model.layers:
        layer.self_attn._forward_pre_hooks.clear()
    return statistics


def with_output(statistics, counts):
    """Return the statistics with a random change of the output projection."""
    heads = ComponentHeads(statistics.layout, counts)
    shape = heads.shapes_of_fitted(biased=False)[heads.output_name]
    change = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return HeadStatistics(statistics.layout, statistics.sums | {heads.output_name: change})


def changed_model(model, make, counts, method, mixers=None, fitted=False):
    """Return a stock model with every layer's tensors rewritten by `make`, or a mixed model if `mixers` is given."""
    tensors = dict(model.state_dict())
    statistics = calibration_statistics(model) if method == "aligned" else [None] * len(model.model.layers)
    for index, layout in enumerate(layouts(model)):
        prefix, layer_statistics = PREFIX.format(index), statistics[index]
        if min(counts.sides.values()) < HEADS and layer_statistics is not None and fitted:
            layer_statistics = with_output(layer_statistics, counts)
        new = make(ComponentHeads(layout, counts, method), layer_tensors(model, index), layer_statistics)
        tensors = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
        tensors |= {prefix + name: tensor for name, tensor in new.items()}
    backbone = backbone_of(model)
    if mixers is None:
        other = toys.stock_model(backbone, **SIZES).double()
        tensors = {name: tensor for name, tensor in tensors.items() if "mixers" not in name}
    else:
        other = toys.mixed_model(backbone, mixers, **SIZES).double()
    other.load_state_dict(tensors)
    return other.eval()


def logits(model):
    with torch.no_grad():
        return model(toys.tokens(length=17)).logits


def explicit(counts):
    return {"explicit": {"key_heads": counts.key, "value_heads": counts.value, "groups": counts.groups, "norm": False}}


@pytest.mark.parametrize("method", ["svd", "aligned"])
@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_keeping_all_heads_gives_same_logits(backbone, method):
    model = toy_model(backbone)
    counts = Counts(HEADS, HEADS)
    other = changed_model(model, ComponentHeads.rewrite, counts, method, explicit(counts))
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("backbone", "method", "counts"),
    grid(
        ["Llama", "Qwen2", "Qwen3"],
        ["svd", "aligned"],
        [Counts(3, 3), Counts(2, 1), Counts(1, 2), Counts(4, 3), Counts(2, 2, 2), Counts(2, 4, 2)],
        strength=1,
    ),
)
def test_explicit_mixer_gives_same_logits_as_approximated_stock_model(backbone, method, counts):
    model = toy_model(backbone)
    ours = changed_model(model, ComponentHeads.rewrite, counts, method, explicit(counts), fitted=True)
    stock = changed_model(model, ComponentHeads.approximate, counts, method, fitted=True)
    if method == "aligned":
        without_output = changed_model(model, ComponentHeads.approximate, counts, method)
        assert not torch.allclose(logits(stock), logits(without_output), atol=1e-3)
    assert not torch.allclose(logits(stock), logits(model), atol=1e-3)
    # The norms of the stock classes compute in float32.
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["svd", "aligned"])
@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_rewritten_names_lists_changed_tensors(backbone, method):
    model = toy_model(backbone)
    statistics, layout = calibration_statistics(model)[0], layouts(model)[0]
    tensors = layer_tensors(model, 0)
    for counts in (Counts(2, 4), Counts(4, 3), Counts(1, 1)):
        new = ComponentHeads(layout, counts, method).rewrite(tensors, with_output(statistics, counts))
        names = set(ComponentHeads(layout, counts, method).rewritten_names()) & new.keys()
        differ = {
            n for n, t in new.items() if n not in tensors or t.shape != tensors[n].shape or (t != tensors[n]).any()
        }
        identity = {f"mixers.explicit.{side}.weight" for side, n in counts.sides.items() if n == HEADS}
        assert names == differ - identity
        assert all(torch.equal(new[name], torch.eye(HEADS).double()) for name in identity)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_svd_method_matches_appendix_f(count):
    """The reference has the shapes of the appendix: a matrix (Dim, H d), viewed as (d Dim, H)."""
    model = toy_model("Llama")
    tensors = layer_tensors(model, 0)
    new = ComponentHeads(layouts(model)[0], Counts(count, count), "svd").rewrite(tensors, None)
    for side, projection in (("key", "k_proj"), ("value", "v_proj")):
        matrix = tensors[f"{projection}.weight"].T
        columns = torch.stack([matrix[:, i * D : (i + 1) * D].T.flatten() for i in range(HEADS)], dim=1)
        values, right = torch.linalg.eigh(columns.T @ columns)
        expected = sum(torch.outer(columns @ right[:, -k], right[:, -k]) for k in range(1, count + 1))
        basis = new[f"{projection}.weight"].unflatten(0, (count, D)).flatten(1).T
        scalars = new[f"mixers.explicit.{side}.weight"]
        torch.testing.assert_close(basis @ scalars.T, expected)
        torch.testing.assert_close(basis.T @ basis, torch.eye(count).double())
        torch.testing.assert_close(scalars.norm(dim=0), values.flip(0)[:count].sqrt())
    assert torch.equal(new["q_proj.weight"], tensors["q_proj.weight"])
    assert torch.equal(new["o_proj.weight"], tensors["o_proj.weight"])


@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_reordered_groups_match_model_with_reordered_heads(backbone):
    model, other, order = toy_model(backbone), toy_model(backbone), [0, 3, 1, 2]
    queries = [2 * head + offset for head in order for offset in (0, 1)]
    for index, layout in enumerate(layouts(model)):
        reordered = reorder(layer_tensors(model, index), queries, layout)
        other.model.layers[index].self_attn.load_state_dict(reordered)
    torch.testing.assert_close(logits(other), logits(model))
    statistics, layout, tensors = calibration_statistics(model)[1], layouts(model)[1], layer_tensors(model, 1)
    counts, consecutive = Counts(2, 4, 2, reorders=True), Counts(2, 4, 2)
    ordered = HeadStatistics(layout, statistics.sums | {"order.2x4.2groups.reordered": torch.tensor(order)})
    new = ComponentHeads(layout, counts).rewrite(tensors, ordered)
    expected = ComponentHeads(layout, consecutive).rewrite(layer_tensors(other, 1), calibration_statistics(other)[1])
    for name, tensor in expected.items():
        torch.testing.assert_close(new[name], tensor, rtol=1e-5, atol=1e-7)
    moved = {name for name, tensor in tensors.items() if name in new and tensor.shape == new[name].shape}
    assert moved - {"q_norm.weight", "k_norm.weight"} <= set(ComponentHeads(layout, counts).rewritten_names())


def test_similar_heads_are_assigned_to_same_group():
    """Heads whose keys and values differ only by maps that the layer absorbs, and some noise, share a group."""
    model = toy_model("Llama")
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = projection.weight.data.unflatten(0, (HEADS, D))
            for one, like in ((3, 0), (2, 1)):
                heads[one] = -2 * heads[like] + 0.1 * heads[one]
    counts = Counts(2, 2, 2, reorders=True)
    for statistics, layout in zip(calibration_statistics(model), layouts(model), strict=True):
        sums = ComponentHeads(layout, counts).with_order(statistics).sums
        assert sums["order.2x2.2groups.reordered"].tolist() == [0, 3, 1, 2]
    target, lost = logits(model), {}
    for reorders in (True, False):
        changed = changed_model(model, ComponentHeads.approximate, replace(counts, reorders=reorders), "aligned")
        lost[reorders] = (logits(changed) - target).norm()
    assert lost[True] < 0.3 * lost[False]


def test_aligned_method_has_lower_error_than_svd():
    model = toy_model("Llama")
    target = logits(model)
    lost = {
        method: (logits(changed_model(model, ComponentHeads.approximate, Counts(3, 3), method)) - target).norm()
        for method in ("svd", "aligned")
    }
    assert lost["aligned"] < 0.7 * lost["svd"]


def test_rewrite_is_deterministic():
    model = toy_model("Llama")
    tensors, layout = layer_tensors(model, 1), layouts(model)[1]
    first, second = (
        ComponentHeads(layout, Counts(3, 2)).rewrite(tensors, calibration_statistics(model)[1]) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("counts", [Counts(3, 2), Counts(2, 2, 2, True)], ids=["one group", "groups"])
@pytest.mark.parametrize("backbone", ["Llama", "Qwen2", "Qwen3"])
def test_saved_solution_is_reused_without_solving(backbone, counts, monkeypatch):
    model = toy_model(backbone)
    tensors, layout, statistics = layer_tensors(model, 1), layouts(model)[1], calibration_statistics(model)[1]
    expected = ComponentHeads(layout, counts).rewrite(tensors, statistics)
    result = ComponentHeads(layout, counts).fitted(statistics)
    shapes = ComponentHeads(layout, counts).shapes_of_fitted(biased=backbone == "Qwen2")
    assert {name: tuple(tensor.shape) for name, tensor in result.items()} == {
        name: shape for name, shape in shapes.items() if not name.startswith(("output", "fitted"))
    }
    assert len(result) == 2 * len(FRAME) + counts.reorders
    extended = HeadStatistics(layout, statistics.sums | result)
    monkeypatch.setattr("crosshead.conversion.compress.component_heads.Errors", None)
    again = ComponentHeads(layout, counts).rewrite(tensors, extended)
    assert all(torch.equal(expected[name], again[name]) for name in expected)


def test_rewritten_tensors_keep_dtype():
    model = toy_model("Qwen2")
    tensors = {name: tensor.float() for name, tensor in layer_tensors(model, 0).items()}
    new = ComponentHeads(layouts(model)[0], Counts(2, 2)).rewrite(tensors, calibration_statistics(model)[0])
    assert {tensor.dtype for tensor in new.values()} == {torch.float32}


def test_missing_or_mismatched_statistics_are_refused():
    model = toy_model("Llama")
    sums = {f"{side}.{kind}": torch.zeros(2, 3, 1, 1) for side in ("key", "value") for kind in KINDS}
    other = HeadStatistics(layouts(model)[0], sums)
    with pytest.raises(ConversionError, match="calibration"):
        ComponentHeads(layouts(model)[0], Counts(2, 2)).rewrite(layer_tensors(model, 0), other)
    with pytest.raises(ConversionError, match="statistics"):
        ComponentHeads(layouts(model)[0], Counts(2, 2)).rewrite(layer_tensors(model, 0), None)
