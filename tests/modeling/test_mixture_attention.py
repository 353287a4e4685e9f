"""`mixture` that skips work: the chosen queries alone give what all of them would, in outputs and gradients."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from crosshead.modeling import (
    chosen_projection,
    mixture,
    quick_products,
    routed_attention,
    triangle_attention,
    visible_keys,
)
from crosshead.modeling.quick_products import MULTIPLIES
from crosshead.modeling.routed_attention import pays
from oracle_layers import assert_sdpa_agrees
from routed_cases import (
    INPUTS,
    MASKS,
    MIXTURES,
    SKIPPING,
    WINDOW,
    call_of,
    check,
    logits_and_gradients,
    logits_in_parts,
    lower,
    routes,
    seen_under,
)
from tiers import first, grid
from toys import mixed_model, tokens

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def check_a_random_shape(kind: str, dtype: torch.dtype) -> None:
    make, groups, size = MASKS[kind], random.randint(1, 3), random.randint(1, 4)
    queries = random.choice((1, 2, 7, 16, 33, random.randint(1, 70)))
    sizes = (random.randint(1, 3), queries, queries if make is None else queries + random.choice((0, 0, 5)))
    shared = random.randint(0, groups * size)
    q = torch.randn(sizes[0], groups * size, queries, 4, dtype=dtype, requires_grad=True)
    k = torch.randn(sizes[0], groups, sizes[2], 4, dtype=dtype, requires_grad=True)
    v = torch.randn(sizes[0], groups, sizes[2], random.choice((4, 6)), dtype=dtype, requires_grad=True)
    chosen = routes(sizes, groups * size, shared)
    mask = None if make is None else make(sizes)
    call = call_of(mask, kind != "all")
    found = routed_attention.routed_attention(q, k, v, chosen, shared, call)
    check(found, [q, k, v], chosen, seen_under(kind, sizes, mask), TOLERANCES[dtype])
    with torch.no_grad():  # of more keys than are seen, by other products
        again = routed_attention.routed_attention(q, k, v, chosen, shared, call)
    torch.testing.assert_close(again, found, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


WAYS = ("quick products", "a block at once", "many heads at once")


def set_blocks(rows: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of blocks, and the way to attend to one, whichever is this processor's."""
    if way == "quick products" and not MULTIPLIES:
        pytest.skip("oneDNN does not multiply here")
    monkeypatch.setattr(quick_products, "_is_quicker", lambda: way == "quick products")
    monkeypatch.setattr(triangle_attention, "GREATEST_PART", math.inf if way == "many heads at once" else 0.0)
    monkeypatch.setattr(triangle_attention, "LEAST_OF_MOST", 0.5)
    monkeypatch.setattr(triangle_attention, "LEAST_READERS", 1)
    for module, name in ((routed_attention, "ROWS"), (routed_attention, "JOINED_ROWS"), (triangle_attention, "ROWS")):
        monkeypatch.setattr(module, name, rows)
    monkeypatch.setattr(visible_keys, "STRIPE", 1 + rows % 7)


@pytest.mark.parametrize(("kind", "dtype", "rows", "way"), grid(MASKS, TOLERANCES, (1, 4, 5, 128), WAYS, strength=1))
@pytest.mark.parametrize("shapes", first([5, 20]))
def test_random_shapes(
    shapes: int, kind: str, dtype: torch.dtype, rows: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 shapes for each of 7 masks, 2 formats, 4 sizes of blocks and 3 ways: 3,360 in the slow tier."""
    set_blocks(rows, way, monkeypatch)
    torch.manual_seed(0)
    random.seed(f"{kind}{dtype}{rows}")
    for _ in range(shapes):
        check_a_random_shape(kind, dtype)


@pytest.mark.parametrize("chosen", (False, True))
def test_nothing_and_everything(chosen: bool) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    routed = torch.full((1, 40, 2), chosen)
    found = routed_attention.routed_attention(q, k, v, routed, 0, call_of(None))
    assert bool(found.any()) == chosen
    check(found, [q, k, v], routed, lower((1, 40, 40)), 1e-12)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Skip work for several queries, however few, and note the number of queries of each call."""
    seen: list[int] = []

    def noted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return routed_attention.routed_attention(query, *rest)

    monkeypatch.setattr(mixture, "routed_attention", noted)
    for name in ("LEAST_QUERIES", "LEAST_QUERIES_OF_MANY"):
        monkeypatch.setattr(routed_attention, name, 2)
    monkeypatch.setattr(routed_attention, "GREATEST_SHARE", 1.0)
    for module, name in ((routed_attention, "ROWS"), (routed_attention, "JOINED_ROWS"), (triangle_attention, "ROWS")):
        monkeypatch.setattr(module, name, 3)
    monkeypatch.setattr(triangle_attention, "GREATEST_PART", math.inf)
    yield seen


@pytest.mark.parametrize(
    ("case", "heads", "padding"), grid(MIXTURES, ((4, 2), (4, 1), (4, 4)), ((0, 0), (0, 2), None), strength=1)
)
def test_layer(case: str, heads: tuple[int, int], padding: tuple[int, int] | None, asked: list[int]) -> None:
    """Against the oracle, with a mask and without."""
    if "differential" in case and heads[1] == 1:
        pytest.skip("differential pairs key/value heads")
    assert_sdpa_agrees(MIXTURES[case], heads, padding)
    assert asked == ([] if "differential" in case else [7])


@pytest.mark.parametrize(("kind", "changes"), grid(INPUTS, ({}, WINDOW), strength=1))
def test_model(kind: str, changes: dict[str, Any], asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model, as the library makes its masks."""
    model = mixed_model("Qwen3", SKIPPING, "sdpa", **changes).double()
    found = logits_and_gradients(model, kind)
    assert asked == [12, 12]
    monkeypatch.setattr(routed_attention, "GREATEST_SHARE", 0.0)
    for ours, dense in zip(found, logits_and_gradients(model, kind), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)  # norms and positions run in float32
    assert asked == [12, 12]


@pytest.mark.parametrize(("head", "kind"), grid(range(3), INPUTS, strength=1))
def test_a_router_that_chooses_one_head_for_all(
    head: int, kind: str, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing for the others: gradients of routers and projections too, skipped work or not."""

    def rigged(router: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = router(hidden)
        if logits.shape[-1] == 3:
            logits = logits + 30 * nn.functional.one_hot(torch.tensor(head), 3)
        return logits.softmax(-1)

    monkeypatch.setattr(mixture, "scores", rigged)
    for name in ("LEAST_TOKENS", "LEAST_FEATURES", "GREATEST_SHARE"):
        monkeypatch.setattr(chosen_projection, name, 1)
    model = mixed_model("Llama", SKIPPING, "sdpa").double()
    gates = []
    for layer in model.model.layers:
        layer.self_attn.mixers["mixture"].register_forward_hook(lambda _, __, output: gates.append(output[0]))
    found = logits_and_gradients(model, kind)
    assert asked == [12, 12]
    assert all(
        (gate[..., 1:] != 0).sum((0, 1)).tolist() == [24 * (each == head) for each in range(3)] for gate in gates
    )
    monkeypatch.setattr(routed_attention, "GREATEST_SHARE", 0.0)
    monkeypatch.setattr(chosen_projection, "GREATEST_SHARE", 0.0)
    for ours, dense in zip(found, logits_and_gradients(model, kind), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)
    assert asked == [12, 12]


def test_a_prompt_in_parts(asked: list[int]) -> None:
    model, ids = mixed_model("Llama", SKIPPING, "sdpa"), tokens(2, 12)
    found = logits_in_parts(model, ids, (5, 6, 1))
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert asked == [5, 5, 6, 6, 12, 12]


REFUSED: dict[str, dict[str, Any]] = {
    "another backend": {"plain": False},
    "dropout": {"dropout": 0.1},
    "numbers added to the scores": {"mask": torch.zeros(1, 1, 1100, 1100)},
    "a mask of each head": {"mask": torch.ones(1, 4, 1100, 1100, dtype=torch.bool)},
}


def test_what_is_left_to_the_backend() -> None:
    q, call = torch.zeros(1, 4, 1100, 8), call_of(None)
    assert pays(q, q, 0.5, call)
    assert not pays(q, q, 0.9, call)
    assert not pays(q[:, :, :9], q, 0.5, call)
    assert not pays(q.bfloat16(), q.bfloat16(), 0.5, call)
    assert not pays(q.to("meta"), q, 0.5, call)
    with torch.autocast("cpu", torch.bfloat16):
        assert not pays(q, q, 0.5, call)
    for facts in REFUSED.values():
        assert not pays(q, q, 0.5, replace(call, **facts))


@pytest.mark.parametrize("quick", (False, True))
@torch.no_grad()
def test_many_heads_pay_sooner_where_products_are_quick(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_products, "_has_kernels", lambda: True)
    monkeypatch.setattr(quick_products, "_is_quicker", lambda: quick)
    q, call = torch.zeros(1, 1, 2048, 8), call_of(None)
    assert pays(q[:, :, :1024], q, 0.5, call)
    assert pays(q[:, :, :1024], q, 0.7, call) == quick
    assert pays(q, q, 0.7, call)
    with torch.enable_grad():
        assert not pays(q[:, :, :1024], q, 0.7, call)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_long_prompt(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes that are shipped."""
    model = mixed_model("Llama", SKIPPING, "sdpa", max_position_embeddings=2048).to(dtype)
    ids = tokens(1, 1100)
    with torch.no_grad():
        found = model(ids).logits
        monkeypatch.setattr(routed_attention, "GREATEST_SHARE", 0.0)
        expected = model(ids).logits
    assert torch.equal(found, expected) == (dtype == torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("asked")
def test_a_compiled_step_keeps_one_graph(asked: list[int]) -> None:
    model = mixed_model("Llama", SKIPPING, "sdpa").train()
    ids = tokens()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    assert not asked
    torch.compiler.reset()
