"""`mixture` that skips work: the chosen queries alone give what all of them would, in outputs and gradients."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from crosshead.modeling import mixture, routed_attention, visible_keys
from crosshead.modeling.mixer import AttentionCall
from crosshead.modeling.routed_attention import pays
from oracle_layers import OPTION_CASES, Layer, assert_layer_agrees
from toys import mixed_model, tokens

Sizes = tuple[int, int, int]
"""Sequences, queries and keys of each."""
MIXTURES = {name: mixers for name, mixers in OPTION_CASES.items() if "mixture" in mixers}
MIXTURES["mixture before differential"] = {"mixture": {"shared_heads": 0, "active_heads": 1}, "differential": {}}
SKIPPING = {"mixture": {"shared_heads": 1, "active_heads": 2}}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def unused(*_: torch.Tensor) -> Any:
    raise AssertionError("the backend was asked")


def call_of(mask: torch.Tensor | None, causal: bool) -> AttentionCall:
    return AttentionCall(unused, eager=False, mask=mask, scaling=0.4, dropout=0.0, plain=True, causal=causal)


def lower(sizes: Sizes) -> torch.Tensor:
    """The last query sees the last key."""
    _, queries, keys = sizes
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def padded_left(sizes: Sizes) -> torch.Tensor:
    padding = torch.tensor([random.randint(0, sizes[2]) for _ in range(sizes[0])])
    return lower(sizes) & (torch.arange(sizes[2]) >= padding[:, None, None])


def padded_right(sizes: Sizes) -> torch.Tensor:
    real = torch.tensor([random.randint(1, sizes[2]) for _ in range(sizes[0])])
    return lower(sizes) & (torch.arange(sizes[2]) < real[:, None, None])


def documents(sizes: Sizes) -> torch.Tensor:
    """Packed: a token sees its own document; queries are the last of the keys."""
    starts = torch.rand(sizes[0], sizes[2]) < 0.2
    document = starts.cumsum(-1)
    queries = document[:, sizes[2] - sizes[1] :] if sizes[2] >= sizes[1] else document[:, :1].expand(-1, sizes[1])
    return lower(sizes) & (queries[:, :, None] == document[:, None, :])


def window(sizes: Sizes) -> torch.Tensor:
    seen = lower(sizes)
    return (seen & ~seen.tril(sizes[2] - sizes[1] - random.randint(1, 9))).expand(sizes[0], -1, -1)


def scattered(sizes: Sizes) -> torch.Tensor:
    """Nothing causal about it, and some queries see nothing."""
    return torch.rand(sizes) < random.choice((0.02, 0.5))


MASKS: dict[str, Callable[[Sizes], torch.Tensor] | None] = {
    "causal": None,
    "all": None,
    "padded left": padded_left,
    "padded right": padded_right,
    "documents": documents,
    "window": window,
    "scattered": scattered,
}


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """All of attention by the book, then zeros where a query was not chosen or sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = (0.4 * q @ k.transpose(2, 3)).masked_fill(~seen[:, None], torch.finfo(q.dtype).min)
    counts = chosen & seen.any(-1, keepdim=True)
    return (logits.softmax(-1) @ v).transpose(1, 2) * counts[..., None]


def routes(sizes: Sizes, heads: int, shared: int) -> torch.Tensor:
    """Some heads get nothing, some everything, most something; the shared ones come first."""
    share = torch.tensor([random.choice((0.0, 0.1, 0.5, 1.0)) for _ in range(heads)])
    share[:shared] = 1.0
    return torch.rand(sizes[0], sizes[1], heads) < share


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
    seen = (torch.ones(sizes, dtype=torch.bool) if kind == "all" else lower(sizes)) if mask is None else mask
    call = call_of(None if mask is None else mask.expand(sizes)[:, None], kind != "all")
    found = routed_attention.routed_attention(q, k, v, chosen, shared, call)
    expected = plain(q, k, v, chosen, seen.expand(sizes))
    direction = torch.randn_like(expected)
    ours, truth = (torch.autograd.grad(x, (q, k, v), direction) for x in (found, expected))
    for mine, theirs in zip((found, *ours), (expected, *truth), strict=True):
        assert (mine - theirs).abs().max() < TOLERANCES[dtype] * max(1.0, theirs.abs().max().item())


@pytest.fixture(params=(1, 5, 128))
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_attention, "ROWS", request.param)
    monkeypatch.setattr(visible_keys, "STRIPE", 1 + request.param % 7)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", MASKS)
def test_random_shapes(kind: str, dtype: torch.dtype) -> None:
    """20 shapes for each of 7 masks, 2 formats and 3 sizes of blocks: 840."""
    torch.manual_seed(0)
    random.seed(f"{kind}{dtype}{routed_attention.ROWS}")
    for _ in range(20):
        check_a_random_shape(kind, dtype)


@pytest.mark.parametrize("chosen", (False, True))
def test_nothing_and_everything(chosen: bool) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    routed = torch.full((1, 40, 2), chosen)
    found = routed_attention.routed_attention(q, k, v, routed, 0, call_of(None, True))
    expected = plain(q, k, v, routed, lower((1, 40, 40))[None])
    assert (found - expected).abs().max() < 1e-12
    assert bool(expected.any()) == chosen
    found.sum().backward()
    assert bool(q.grad.any() and k.grad.any() and v.grad.any()) == chosen


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Skip work for several queries, however few, and note the number of queries of each call."""
    seen: list[int] = []

    def noted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return routed_attention.routed_attention(query, *rest)

    monkeypatch.setattr(mixture, "routed_attention", noted)
    monkeypatch.setattr(routed_attention, "LEAST_QUERIES", 2)
    monkeypatch.setattr(routed_attention, "GREATEST_SHARE", 1.0)
    monkeypatch.setattr(routed_attention, "ROWS", 3)
    yield seen


@pytest.mark.parametrize("padding", ((0, 0), (0, 2), None))
@pytest.mark.parametrize("heads", ((4, 2), (4, 1), (4, 4)))
@pytest.mark.parametrize("case", MIXTURES)
def test_layer(case: str, heads: tuple[int, int], padding: tuple[int, int] | None, asked: list[int]) -> None:
    """Against the oracle, with a mask and without."""
    if "differential" in case and heads[1] == 1:
        pytest.skip("differential pairs key/value heads")
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    layer = Layer("Qwen3", MIXTURES[case], padding or (0, 0), **sizes)
    layer.attention.config._attn_implementation = "sdpa"
    mask = None if padding is None else layer.allowed[:, None]

    def run() -> torch.Tensor:
        output, _ = layer.attention(layer.inputs, (layer.cos, layer.sin), mask)
        return output

    assert_layer_agrees(layer, run)
    assert asked == ([] if "differential" in case else [7])


def logits_and_gradients(model: Any, inputs: dict[str, Any], real: torch.Tensor) -> list[torch.Tensor]:
    logits = model(**inputs, use_cache=False).logits[real]
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), [*model.parameters()])]


PADDING = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])
INPUTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padded left": {"attention_mask": PADDING},
    "padded right": {"attention_mask": PADDING.flip(1)},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(2, -1)},
}
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("changes", ({}, WINDOW), ids=("full", "window"))
@pytest.mark.parametrize("kind", INPUTS)
def test_model(kind: str, changes: dict[str, Any], asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model, as the library makes its masks."""
    model = mixed_model("Qwen3", SKIPPING, "sdpa", **changes).double()
    inputs = {"input_ids": tokens(2, 12), **INPUTS[kind]}
    real = INPUTS[kind].get("attention_mask", torch.ones(2, 12)).bool()
    found = logits_and_gradients(model, inputs, real)
    assert asked == [12, 12]
    monkeypatch.setattr(routed_attention, "GREATEST_SHARE", 0.0)
    for ours, dense in zip(found, logits_and_gradients(model, inputs, real), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)  # norms and positions run in float32
    assert asked == [12, 12]


@torch.no_grad()
def test_a_prompt_in_parts(asked: list[int]) -> None:
    model = mixed_model("Llama", SKIPPING, "sdpa")
    ids, cache = tokens(2, 12), None
    found = []
    for part in ids.split((5, 6, 1), dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), model(ids).logits, rtol=1e-4, atol=1e-5)
    assert asked == [5, 5, 6, 6, 12, 12]


REFUSED: dict[str, dict[str, Any]] = {
    "another backend": {"plain": False},
    "dropout": {"dropout": 0.1},
    "numbers added to the scores": {"mask": torch.zeros(1, 1, 1100, 1100)},
    "a mask of each head": {"mask": torch.ones(1, 4, 1100, 1100, dtype=torch.bool)},
}


def test_what_is_left_to_the_backend() -> None:
    q, call = torch.zeros(1, 4, 1100, 8), call_of(None, True)
    assert pays(q, q, 0.5, call)
    assert not pays(q, q, 0.9, call)
    assert not pays(q[:, :, :9], q, 0.5, call)
    assert not pays(q.bfloat16(), q.bfloat16(), 0.5, call)
    assert not pays(q.to("meta"), q, 0.5, call)
    with torch.autocast("cpu", torch.bfloat16):
        assert not pays(q, q, 0.5, call)
    for facts in REFUSED.values():
        assert not pays(q, q, 0.5, replace(call, **facts))


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


@pytest.mark.compile
@pytest.mark.usefixtures("asked")
def test_a_compiled_step_keeps_one_graph(asked: list[int]) -> None:
    model = mixed_model("Llama", SKIPPING, "sdpa").train()
    ids = tokens()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    assert not asked
    torch.compiler.reset()
