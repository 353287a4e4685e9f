"""An RMSNorm and the projection behind it as one step: the modules' numbers, the book's gradients, less kept."""

import random
import sys
from typing import Any

import pytest
import torch
from torch import nn

import toys
from crosshead.modeling.normed_projection import keeps_less, normed_projection
from crosshead.modeling.ops import HeadRMSNorm
from tiers import first


def plain(heads: torch.Tensor, norm: HeadRMSNorm, projection: nn.Linear) -> torch.Tensor:
    return projection(norm(heads).flatten(2))


def fused(heads: torch.Tensor, norm: HeadRMSNorm, projection: nn.Linear) -> torch.Tensor:
    return normed_projection(heads, norm.weight, norm.eps, projection)


def gradients(run: Any, heads: torch.Tensor, *modules: Any) -> list[torch.Tensor]:
    for module in modules:
        module.zero_grad()
    heads = heads.detach().requires_grad_()
    output = run(heads, *modules)
    output.pow(2).mean().backward()
    given = [heads, *(weight for module in modules for weight in module.parameters())]
    return [output.detach(), *(x.grad.clone() for x in given if x.grad is not None)]


@pytest.mark.parametrize("cases", first([50, 500]))
def test_equals_the_modules_on_random_shapes(cases: int) -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    for _ in range(cases):
        batch, tokens, heads, size, hidden = (draw.randint(1, most) for most in (3, 9, 5, 9, 11))
        norm = HeadRMSNorm(size, draw.choice([1e-6, 1e-2])).double()
        projection = nn.Linear(heads * size, hidden, bias=draw.random() < 0.5).double()
        nn.init.normal_(norm.weight)
        frozen = draw.choice([None, norm, projection])
        if frozen is not None:
            frozen.requires_grad_(False)
        given = torch.randn(batch, heads, tokens, size, dtype=torch.float64).transpose(1, 2)
        expected, found = (gradients(run, given, norm, projection) for run in (plain, fused))
        assert len(expected) == len(found) and torch.equal(expected[0], found[0])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_one_fixed_scale() -> None:
    torch.manual_seed(0)
    projection, heads = nn.Linear(12, 7).double(), torch.randn(2, 5, 3, 4, dtype=torch.float64)
    norm = HeadRMSNorm(4, 1e-6).double()
    nn.init.constant_(norm.weight, 0.3)

    def fixed(heads: torch.Tensor, projection: nn.Linear) -> torch.Tensor:
        return normed_projection(heads, 0.3, 1e-6, projection)

    expected = gradients(lambda x, projection: plain(x, norm, projection), heads, projection)
    torch.testing.assert_close(gradients(fixed, heads, projection), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", (False, True))
def test_half_precision(autocast: bool) -> None:
    torch.manual_seed(0)
    norm, projection, heads = HeadRMSNorm(16, 1e-6), nn.Linear(64, 48), torch.randn(2, 30, 4, 16)
    nn.init.normal_(norm.weight)
    exact = gradients(plain, heads.double(), norm.double(), projection.double())
    modules: list[Any] = [norm.float(), projection.float()] if autocast else [norm.bfloat16(), projection.bfloat16()]

    def errors(run: Any) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = gradients(run, heads.bfloat16(), *modules)
        assert [x.dtype for x in found[2:]] == [modules[0].weight.dtype] * 3
        return [float((x.double() - wanted).norm() / wanted.norm()) for x, wanted in zip(found, exact, strict=True)]

    for ours, theirs in zip(errors(fused), errors(plain), strict=True):
        assert ours <= 1.1 * theirs


def kept(model: Any) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    stored: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        stored[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(torch.arange(1, 49).view(1, 48))
    return sum(stored.values())


def take_apart(monkeypatch: pytest.MonkeyPatch, model: Any, name: str) -> None:
    """From here on the two are two steps."""
    mechanism = type(model.model.layers[0].self_attn.mixers[name])
    monkeypatch.setattr(sys.modules[mechanism.__module__], "keeps_less", lambda *_: False)


@pytest.mark.parametrize(("name", "between"), (("explicit", 2), ("differential", 1)))
def test_models_keep_less(name: str, between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.mixed_model("Llama", {name: {}}).train()
    ours = kept(model)
    take_apart(monkeypatch, model, name)
    config = model.config
    heads = 48 * config.num_attention_heads * config.head_dim * 4
    assert kept(model) - ours == between * config.num_hidden_layers * heads  # normed heads, and weighted ones


@pytest.mark.parametrize("backbone", toys.BACKBONES)
@pytest.mark.parametrize("name", ("explicit", "differential"))
def test_models_have_the_plain_gradients(backbone: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.mixed_model(backbone, {name: {}}).train()
    precise = backbone != "Qwen3Moe"  # torch's product for experts knows no float64
    model, bound = (model.double(), 1e-10) if precise else (model, 1e-5)
    tokens = torch.arange(1, 25).view(2, 12)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(tokens, labels=tokens)
        output.loss.backward()
        return [output.logits.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]

    ours = run()
    take_apart(monkeypatch, model, name)
    torch.testing.assert_close(ours, run(), rtol=bound, atol=bound)


def test_leaves_alone_what_is_watched_or_wrapped() -> None:
    norm, projection = HeadRMSNorm(4, 1e-6), nn.Linear(8, 8)
    assert keeps_less(projection, norm) and keeps_less(projection)
    with torch.no_grad():
        assert not keeps_less(projection, norm)
    assert not keeps_less(type("Wrapped", (nn.Linear,), {})(8, 8), norm)
    norm.register_forward_hook(lambda *_: None)
    assert not keeps_less(projection, norm)
