"""Projections of chosen tokens alone under `mixture`: what the whole projections give, wherever it counts."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from crosshead.modeling import chosen_projection, mixture, quick_products
from crosshead.modeling.chosen_projection import ChosenTokens, pays_to_choose
from crosshead.modeling.mechanisms.base import HeadStates
from routed_cases import INPUTS, SKIPPING, call_of, logits_and_gradients, routes
from tiers import first, grid
from toys import BACKBONES, mixed_model, tokens

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def _from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy sizes are enough."""
    monkeypatch.setattr(chosen_projection, "LEAST_TOKENS", 1)
    monkeypatch.setattr(chosen_projection, "LEAST_FEATURES", 1)
    monkeypatch.setattr(chosen_projection, "GREATEST_SHARE", 1.0)
    monkeypatch.setattr(chosen_projection, "GREATEST_EVALUATED_SHARE", 1.0)


def agree(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor], tolerance: float) -> None:
    """Outputs and gradients; the expected ones in float64."""
    direction = torch.randn_like(expected)
    ours = torch.autograd.grad(found, inputs, direction.to(found.dtype))
    truth = torch.autograd.grad(expected, inputs, direction)
    for mine, theirs in zip((found, *ours), (expected, *truth), strict=True):
        assert (mine - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("shapes", first([10, 130]))
def test_random_shapes(shapes: int, bias: bool, dtype: torch.dtype) -> None:
    """Heads that got nothing or everything, one token, one head, with shared heads and without."""
    torch.manual_seed(0)
    random.seed(f"{bias}{dtype}")
    for _ in range(shapes):
        heads, size, features = random.randint(1, 6), random.randint(1, 5), random.randint(1, 9)
        sizes, shared = (
            (random.randint(1, 3), random.choice((1, 2, random.randint(3, 20))), 0),
            random.randint(0, heads),
        )
        chosen = routes(sizes, heads, shared)
        kept = ChosenTokens(chosen.flatten(0, 1), shared)
        into, out = nn.Linear(features, heads * size, bias=bias), nn.Linear(heads * size, features, bias=bias)
        into, out = into.to(dtype), out.to(dtype)
        hidden = torch.randn(*sizes[:2], features, dtype=dtype, requires_grad=True)
        output = torch.randn(*sizes[:2], heads, size, dtype=dtype, requires_grad=True)
        whole = [nn.functional.linear(hidden.double(), *(x.double() for x in into.parameters()))]
        whole[0] = whole[0] * chosen.repeat_interleave(size, -1)
        counted = (output * chosen[..., None]).flatten(2)
        whole.append(nn.functional.linear(counted.double(), *(x.double() for x in out.parameters())))
        agree(kept.project_in(into, hidden), whole[0], [hidden, *into.parameters()], TOLERANCES[dtype])
        agree(kept.project_out(out, output), whole[1], [output, *out.parameters()], TOLERANCES[dtype])
        with torch.no_grad():  # by other products
            kept = ChosenTokens(chosen.flatten(0, 1), shared)
            found = kept.project_in(into, hidden), kept.project_out(out, output)
        for mine, exact in zip(found, whole, strict=True):
            torch.testing.assert_close(mine, exact.to(dtype), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", ("into", "out of"))
def test_what_was_not_chosen_is_not_read(name: str) -> None:
    """There it may hold anything."""
    chosen = torch.tensor([[True, False], [True, True]])
    heads = torch.randn(2, 2, 3).masked_fill(~chosen[..., None], torch.nan)
    kept, weight = ChosenTokens(chosen, 1), torch.randn(2, 3, 4)
    if name == "out of":
        assert not kept.out_of(heads, weight).isnan().any()
    assert not kept.products(heads, torch.randn(2, 4)).isnan().any()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which projections were done for chosen tokens alone."""
    seen: list[str] = []

    def noting(name: str) -> None:
        run = getattr(ChosenTokens, name)
        monkeypatch.setattr(ChosenTokens, name, lambda *given: seen.append(name) or run(*given))

    for name in ("project_in", "project_out"):
        noting(name)
    return seen


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is left out."""
    monkeypatch.setattr(mixture, "pays_to_choose", lambda *_: False)


ROUTERS = {
    "two_stage": ["project_in", "project_out"],
    "query_norm": ["project_out"],
}


@pytest.mark.parametrize(
    ("backbone", "router", "gate", "kind"), grid(BACKBONES, ROUTERS, ("weighted", "binary"), INPUTS, strength=1)
)
def test_models(
    backbone: str, router: str, gate: str, kind: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and the gradients of every parameter, biases among them."""
    model = mixed_model(backbone, {"mixture": SKIPPING["mixture"] | {"router": router, "gate": gate}}, "sdpa")
    if backbone != "Qwen3Moe":  # torch's product for experts knows no float64
        model = model.double()
    found = logits_and_gradients(model, kind)
    assert chosen == ROUTERS[router] * 2
    whole(monkeypatch)
    bound = 1e-4 if backbone == "Qwen3Moe" else 1e-9
    torch.testing.assert_close(found, logits_and_gradients(model, kind), rtol=bound, atol=bound)
    assert len(chosen) == 2 * len(ROUTERS[router])


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    projection, hidden = nn.Linear(8, 8), torch.zeros(2, 16, 8)
    monkeypatch.setattr(chosen_projection, "LEAST_TOKENS", 32)
    monkeypatch.setattr(chosen_projection, "LEAST_FEATURES", 8)
    monkeypatch.setattr(chosen_projection, "GREATEST_SHARE", 0.6)
    monkeypatch.setattr(chosen_projection, "GREATEST_EVALUATED_SHARE", 0.75)
    assert pays_to_choose(projection, hidden, 0.5)
    assert not pays_to_choose(projection, hidden, 0.7)
    monkeypatch.setattr(quick_products, "_has_kernels", lambda: True)
    for quick in (False, True):
        monkeypatch.setattr(quick_products, "_is_quicker", lambda quick=quick: quick)
        with torch.no_grad():
            assert pays_to_choose(projection, hidden, 0.7) == quick and not pays_to_choose(projection, hidden, 0.8)
    assert not pays_to_choose(projection, hidden[:, :15], 0.5)
    assert not pays_to_choose(projection, hidden[..., :7], 0.5)
    assert not pays_to_choose(projection, hidden.bfloat16(), 0.5)
    assert not pays_to_choose(projection, hidden.to("meta"), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert not pays_to_choose(projection, hidden, 0.5)
    watched = copy.deepcopy(projection)
    watched.register_forward_hook(lambda *_: None)
    assert not pays_to_choose(watched, hidden, 0.5)
    assert not pays_to_choose(nn.Sequential(projection), hidden, 0.5)


BY_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another mechanism": (SKIPPING | {"knocking": {}}, "sdpa"),
    "eager": (SKIPPING, "eager"),
}


@pytest.mark.parametrize("case", BY_OTHERS)
def test_whole_beside_others(case: str, chosen: list[str]) -> None:
    """Where another mechanism reads the heads, or somebody the weights, all heads are there."""
    mixers, backend = BY_OTHERS[case]
    mixed_model("Llama", mixers, backend)(tokens(2, 12))
    assert chosen == []


def test_call_that_must_give_weights() -> None:
    mixer = mixed_model("Llama", SKIPPING).model.layers[0].self_attn.mixers["mixture"]
    x = torch.randn(1, 4, mixer.layout.hidden_size)
    states = HeadStates(x, x, x, x, x)
    projection = nn.Linear(x.shape[-1], 8)
    assert mixer.chosen_tokens(projection, states, call_of(None)) is None
    mixer.on_hidden(states)
    assert mixer.chosen_tokens(projection, states, call_of(None)) is not None
    assert mixer.chosen_tokens(projection, states, replace(call_of(None), plain=False)) is None
