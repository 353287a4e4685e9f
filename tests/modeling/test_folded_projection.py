"""A linear knock folded into its projection: the same outputs and gradients, and never those of weights that were."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from crosshead.modeling import folded_projection, mixed_attention
from folding import LINEAR, TOKENS, folded, holds, plainly, unfolded
from tiers import grid


@pytest.mark.parametrize(
    ("case", "backbone", "backend"),
    grid(
        ("linear", "knocking+mixture", "with components", "one layer"), toys.BACKBONES, ("eager", "sdpa"), strength=1
    ),
)
def test_equals_unfolded(backbone: str, case: str, backend: str) -> None:
    more = {"with components": {"explicit": {"key_heads": 1, "value_heads": 1}}}.get(case, {})
    layers = {"layers": [1]} if case == "one layer" else {}
    mixers = toys.COMPOSITIONS.get(case, {"knocking": LINEAR["knocking"] | layers} | more)
    model = toys.mixed_model(backbone, mixers, backend)
    precise = backbone != "Qwen3Moe"  # torch's product for experts knows no float64
    model, bound = (model.double(), 1e-9) if precise else (model, 1e-4)
    expected = unfolded(model)
    for _ in range(2):
        torch.testing.assert_close(folded(model), expected, rtol=bound, atol=bound)
    everything = ["query", "key", "value"]
    assert holds(model) == [[] if case == "one layer" else everything, everything]


def test_half_precision() -> None:
    model = toys.mixed_model("Qwen2", LINEAR, "sdpa").double().eval()
    expected = unfolded(model)
    model.bfloat16()
    plain, ours = ((logits.double() - expected).norm() for logits in (unfolded(model), folded(model)))
    assert holds(model)[0] and ours <= 1.5 * plain


@pytest.mark.parametrize("backend", ("eager", "sdpa"))
def test_neutral_is_bit_for_bit(backend: str) -> None:
    stock = toys.stock_model("Llama", backend).eval()
    model = toys.mixed_model("Llama", LINEAR, backend)
    model.load_state_dict(stock.state_dict(), strict=False)
    for name, weight in model.named_parameters():
        if "knocking" in name:
            nn.init.eye_(weight)
    for _ in range(2):
        assert torch.equal(folded(model), folded(stock)) and holds(model)[0]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The weights of projections that are mapped in training from here on."""
    made: list[torch.Size] = []

    def counted(projection: nn.Linear, *others: Any) -> torch.Tensor:
        made.append(projection.weight.shape)
        return mapped(projection, *others)

    mapped = folded_projection.mapped_projection
    monkeypatch.setattr(folded_projection, "mapped_projection", counted)
    return made


MANY = torch.arange(2 * 90).view(2, 90) % toys.SIZES["vocab_size"]


def gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("backbone", "components"),
    grid(toys.BACKBONES, ({}, {"explicit": {"key_heads": 1, "value_heads": 1}}), strength=1),
)
def test_gradients_equal_unfolded(
    backbone: str, components: dict[str, Any], products: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.mixed_model(backbone, LINEAR | components).train()
    precise = backbone != "Qwen3Moe"
    model, bound = (model.double(), 1e-9) if precise else (model, 1e-4)
    ours, logits = gradients(model, MANY), model(MANY).logits
    assert len(products) == 2 * 2 * 3  # calls, layers, sides
    monkeypatch.setattr(mixed_attention, "folds", lambda *_: False)
    torch.testing.assert_close(logits, model(MANY).logits, rtol=bound, atol=bound)
    torch.testing.assert_close(ours, gradients(model, MANY), rtol=bound, atol=bound)
    assert len(products) == 2 * 2 * 3 and any("knocking" in name for name in ours)


def test_training_folds_only_where_it_pays(products: list[torch.Size]) -> None:
    model = toys.mixed_model("Llama", LINEAR).train()
    with torch.no_grad():
        model(MANY)  # weights are about to change
    for name, weight in model.named_parameters():
        weight.requires_grad_("knocking" in name)
    model(MANY)  # a gradient of the projection would be for nothing
    assert not products
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.requires_grad_(True)
    model(MANY)
    assert len(products) == 2
    model.model.layers[0].self_attn.v_proj.register_full_backward_hook(lambda *_: None)
    model(MANY)
    assert len(products) == 3


def test_training_in_half_precision(products: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.mixed_model("Qwen2", LINEAR).double().train()
    expected = gradients(model, MANY)

    def error(run: Any) -> float:
        found = run()
        return sum(float((found[name].double() - value).norm() / value.norm()) for name, value in expected.items())

    def autocast() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model.float(), MANY)

    for run in (autocast, lambda: gradients(model.bfloat16(), MANY)):
        products.clear()
        ours = error(run)
        assert products
        with monkeypatch.context() as plain:
            plain.setattr(mixed_attention, "folds", lambda *_: False)
            assert ours <= 1.2 * error(run)


def test_copies_and_files_hold_none_of_it(tmp_path: Path) -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").eval()
    names = set(model.state_dict())
    logits = folded(model)
    assert set(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(holds(twin)) and torch.equal(folded(twin), logits)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(folded(loaded), logits)


def test_leaves_alone_what_is_watched_wrapped_or_not_first() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").eval()
    first, second = (layer.self_attn for layer in model.model.layers)
    seen: list[str] = []
    first.v_proj.register_forward_hook(lambda *_: seen.append("projection"))
    first.mixers["knocking"].key.register_forward_pre_hook(lambda *_: seen.append("map"))
    first.q_proj.forward = first.q_proj.forward
    second.k_proj.__class__ = type("Wrapped", (nn.Linear,), {})
    folded(model)
    assert holds(model) == [[], ["query", "value"]] and set(seen) == {"projection", "map"}
    later = {"mixture": {"active_heads": 3, "router": "query_norm", "shared_heads": 1}} | LINEAR
    model = toys.mixed_model("Llama", later, "sdpa").eval()
    folded(model)
    assert not any(holds(model))


def test_inference_mode_and_autocast() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").eval()
    expected = unfolded(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS).logits, expected)
    torch.testing.assert_close(folded(model), expected)  # with what was made in inference mode
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        folded(model)
    assert all(kept.product.weight.dtype == torch.float32 for kept in model.model.layers[0].self_attn._folded.values())


def test_nothing_is_mapped_twice() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double().eval()
    expected = folded(model)
    with plainly():
        torch.testing.assert_close(folded(model), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("of_maps", (torch.float32, torch.bfloat16))
def test_maps_of_another_precision_under_autocast(of_maps: torch.dtype) -> None:
    model = toys.mixed_model("Qwen2", LINEAR, "sdpa").double()
    expected = gradients(model, MANY)
    model.bfloat16() if of_maps == torch.float32 else model.float()
    for name, weight in model.named_parameters():
        if "knocking" in name:
            weight.data = weight.data.to(of_maps)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, MANY)
        model.zero_grad()
        plain, ours = unfolded(model.eval()), folded(model)
    assert holds(model)[0] and (ours - plain).norm() < 0.02 * plain.norm()
    for name, gradient in found.items():
        assert gradient.dtype == model.get_parameter(name).dtype
        assert (gradient.double() - expected[name]).norm() < 0.1 * expected[name].norm()
