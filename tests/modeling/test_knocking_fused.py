"""The MLP knock in one pass: outputs and gradients are the oracle's and the plain form's."""

import random
from typing import Any

import pytest
import torch

import oracles
from crosshead.modeling import knocking_fused
from crosshead.modeling.mechanisms.knocking import MlpKnock
from crosshead.modeling.ops import widened
from tiers import first


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy sizes are several blocks."""
    monkeypatch.setattr(knocking_fused, "BLOCK", 5)


def make(seed: int, dtype: torch.dtype = torch.float64) -> tuple[MlpKnock, torch.Tensor]:
    """A knock with random maps, and heads (B, T, heads, d) of random sizes, in memory in one order or another."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = draw.choice((1, 2, 5, 8))
    knock = MlpKnock(size, "identity").to(dtype)
    with torch.no_grad():
        for parameter in knock.parameters():
            parameter.copy_(torch.randn(size, size, generator=generator))
    x = torch.randn(draw.randint(1, 2), draw.randint(1, 7), draw.randint(1, 3), size, generator=generator).to(dtype)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if draw.random() < 0.5 else x
    return knock, x.requires_grad_(draw.random() < 0.9)


def gradients(knock: MlpKnock, x: torch.Tensor, output: torch.Tensor) -> list[torch.Tensor]:
    """Of a lopsided sum, by parameter and, where it has one, input."""
    direction = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).reshape(output.shape).to(output.dtype)
    leaves = [*knock.parameters(), *([x] if x.requires_grad else [])]
    return list(torch.autograd.grad((output * direction).sum(), leaves))


def truth(knock: MlpKnock, x: torch.Tensor) -> torch.Tensor:
    """The oracle's, vector by vector."""
    weights = {f"mixers.knocking.value.{name}": parameter for name, parameter in knock.named_parameters()}
    options = {"on": ["value"], "form": "mlp"}
    vectors = [oracles.knocking(vector, "value", weights, options) for vector in x.flatten(0, 2)]
    return torch.stack(vectors).reshape(x.shape)


@pytest.mark.parametrize("seeds", first([range(50), range(50, 500)]))
def test_random_shapes(seeds: range) -> None:
    for seed in seeds:
        knock, x = make(seed)
        ours, expected = knock(x), truth(knock, x)
        assert torch.allclose(ours, expected, rtol=1e-11, atol=1e-11)
        for mine, theirs in zip(gradients(knock, x, ours), gradients(knock, x, expected), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            assert torch.allclose(knock(x), expected, rtol=1e-11, atol=1e-11)  # the plain form


@pytest.mark.parametrize("cases", first([20, 200]))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_is_as_close_as_the_plain_form(
    dtype: torch.dtype, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[str, list[Any]] = {"fused": [], "plain": []}
    for seed in range(cases):
        knock, x = make(seed, dtype)
        exact_knock, exact_x = make(seed)
        with torch.no_grad():
            for mine, theirs in zip(exact_knock.parameters(), knock.parameters(), strict=True):
                mine.copy_(theirs)
            exact_x.copy_(x)
        exact = gradients(exact_knock, exact_x, exact_knock(exact_x))
        fused = gradients(knock, x, knock(x))
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)  # which the plain form is for
            plain = gradients(knock, x, knock(x))
        for name, found in (("fused", fused), ("plain", plain)):
            pairs = zip(found, exact, strict=True)
            errors[name].append(torch.stack([(a - b).norm() / b.norm().clamp_min(1e-3) for a, b in pairs]).mean())
    assert widened(dtype) == torch.float32
    assert torch.stack(errors["fused"]).mean() < 1.5 * torch.stack(errors["plain"]).mean()


def test_nothing_but_the_input_is_kept() -> None:
    """Tensors saved for the backward pass: the input, which the projection made, and maps."""
    knock, x = make(3)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        knock(x)
    held = [t for t in saved if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
    assert max(t.numel() for t in held) <= 2 * x.shape[-1] ** 2


def test_autocast() -> None:
    knock, x = make(3, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = knock(x)
    assert output.dtype == torch.bfloat16
    found, expected = gradients(knock, x, output), gradients(knock, x, knock(x))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.05 * theirs.norm()
