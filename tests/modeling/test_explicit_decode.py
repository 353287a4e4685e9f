"""Attention to components without combining them: outputs and gradients are the oracle's, nothing large is copied."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from crosshead.modeling import attention_in_parts, explicit, explicit_decode, few_queries
from crosshead.modeling.explicit_decode import Components, attend_to_components
from explicit_cases import Case, make
from oracle_layers import Layer, assert_layer_agrees
from tiers import first, grid
from toys import CASES, mixed_model, tokens

WAYS = ("at once", "one by one", "by the kernel")


@pytest.fixture(autouse=True, params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whatever the lengths; the kernel where it can."""
    kernel, one_by_one = request.param == "by the kernel", request.param == "one by one"
    monkeypatch.setattr(explicit_decode, "is_quicker", lambda _: not kernel)
    monkeypatch.setattr(explicit_decode, "LARGE", 0 if kernel or one_by_one else math.inf)
    monkeypatch.setattr(attention_in_parts, "LEAST_KEYS", 2)
    return str(request.param)


def assert_agrees(case: Case) -> None:
    """Outputs, and gradients of a lopsided sum, where a query sees anything."""
    for leaf in case.leaves:
        leaf.requires_grad_(True)
    ours, truth = case.ours(), case.truth()
    seen = case.allowed.any(-1)
    assert ours.isfinite().all()
    assert torch.allclose(ours[seen], truth[seen], rtol=1e-10, atol=1e-10)
    direction = (
        torch.linspace(0.5, 1.5, truth.numel(), dtype=torch.float64).reshape(truth.shape) * seen[..., None, None]
    )
    found = torch.autograd.grad((ours * direction).sum(), case.leaves)
    expected = torch.autograd.grad((truth * direction).sum(), case.leaves)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seeds", first([range(10), range(10, 600)]))
def test_random_shapes(seeds: range) -> None:
    for seed in seeds:
        assert_agrees(make(seed))


@pytest.mark.parametrize("cases", first([60, 600]))
@torch.no_grad()
def test_single_precision_without_gradients(cases: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in decoding, where other products may be made; each shape for itself."""
    by_kernel: list[torch.Size] = []
    kernel = explicit_decode.attended_in_parts
    monkeypatch.setattr(
        explicit_decode, "attended_in_parts", lambda x, *rest: by_kernel.append(x.shape) or kernel(x, *rest)
    )
    for seed in range(cases):
        case = make(seed)
        seen, found, exact = case.allowed.any(-1), case.ours(torch.float32), case.plain(torch.float64)
        assert found.isfinite().all()
        torch.testing.assert_close(found[seen].double(), exact[seen], rtol=1e-4, atol=1e-4)
    assert len(by_kernel) > cases / 10 if way == "by the kernel" else not by_kernel


@pytest.mark.parametrize("cases", first([100, 500]))
@torch.no_grad()
def test_half_precision_is_as_close_as_eager_attention(cases: int) -> None:
    """Over many shapes, for outputs alone can be lucky."""
    ours, eager = [], []
    for seed in range(cases):
        case = make(seed)
        seen, exact = case.allowed.any(-1), case.plain(torch.float64)
        for found, output in ((ours, case.ours(torch.bfloat16)), (eager, case.plain(torch.bfloat16))):
            assert output.isfinite().all()
            found.append((output - exact)[seen].abs().mean() / exact[seen].abs().mean())
    errors = [torch.stack(found).nan_to_num().mean() for found in (ours, eager)]
    assert errors[0] < 1.5 * errors[1]


@torch.no_grad()
def test_long_padding() -> None:
    """By both kinds of mask."""
    keys = torch.randn(2, 2, 50, 4)
    allowed = (torch.arange(50) > 40).expand(2, 1, 1, -1)
    query, scalars = torch.randn(2, 3, 1, 4), torch.randn(3, 2)
    for mask in (allowed, torch.zeros(2, 1, 1, 50).masked_fill(~allowed, -math.inf)):
        found = attend_to_components(query, Components(keys, scalars), Components(keys, scalars), None, mask)
        short = Components(keys[:, :, 41:], scalars)
        assert torch.allclose(found, attend_to_components(query, short, short, None, None), atol=1e-5)


class Largest(TorchDispatchMode):
    """The largest tensor that was made, views of others apart."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in held:
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize("combined", (False, True))
@pytest.mark.parametrize("numbers", (0, 3))
@torch.no_grad()
def test_components_are_not_copied(numbers: int, combined: bool) -> None:
    """Where they lie side by side, with numbers beside them too, and heads that nothing combines wherever they lie."""
    heads = torch.randn(2, 40, 2 * 64 + numbers)[..., : 2 * 64].unflatten(-1, (2, 64)).transpose(1, 2)
    heads = heads if combined or numbers else heads.contiguous()
    if not combined and numbers:
        heads = heads[:1]  # of several sequences at once, torch's product would
    side = Components(heads, torch.randn(3, 2) if combined else None)
    query = torch.randn(len(heads), 3 if combined else 2, 1, 64)
    with Largest() as largest:
        attend_to_components(query, side, side, None, None)
    assert largest.numbers < heads[0, 0].numel()


@torch.no_grad()
def test_many_products_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are worth it, where oneDNN is quicker."""
    made: list[int] = []
    monkeypatch.setattr(few_queries, "product", lambda x, y: made.append(len(x)) or x @ y.t())
    monkeypatch.setattr(explicit_decode, "is_quicker", lambda _: True)
    monkeypatch.setattr(explicit_decode, "LARGE", 3 * 40 * 2 * 4)
    for length in (39, 40):
        side = Components(torch.randn(2, 2, length, 4), torch.randn(3, 2))
        attend_to_components(torch.randn(2, 3, 1, 4), side, side, None, None)
        assert made == ([] if length == 39 else [40, 40, 3, 3])


@torch.no_grad()
def test_many_products_are_made_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """From so many on, where oneDNN is not quicker; of queries that it takes at once, under one mask, unscaled."""
    made: list[int] = []
    monkeypatch.setattr(explicit_decode, "attended_in_parts", lambda x, *_: made.append(x.shape[1]) or x)
    monkeypatch.setattr(explicit_decode, "LARGE", 4 * 8 * 2 * 4)

    def attend(rows: int, length: int, scaled: bool = False, quicker: bool = False) -> list[int]:
        made.clear()
        monkeypatch.setattr(explicit_decode, "is_quicker", lambda _: quicker)
        side = Components(torch.randn(1, 2, length, 4), torch.randn(4, 2))
        scale = torch.rand(1, 4, 1, length) if scaled else None
        attend_to_components(torch.randn(1, 4, rows, 4), side, side, scale, None)
        return made

    assert [attend(1, length).copy() for length in (7, 8)] == [[], [4]]
    assert [attend(rows, 64).copy() for rows in (8, 9)] == [[32], []]
    assert not attend(1, 8, scaled=True) and not attend(1, 8, quicker=True)


@pytest.mark.parametrize(
    ("way", "on", "backbone"),
    grid(WAYS, (["key", "value"], ["key"], ["value"]), ("Llama", "Qwen3"), strength=1),
    indirect=["way"],
)
def test_layers_with_a_cache_follow_the_oracle(on: list[str], backbone: str) -> None:
    counts = {f"{side}_heads": 1 for side in on}
    layer = Layer(backbone, {"explicit": {"on": on, **counts}})
    layer.attention.config._attn_implementation = "sdpa"
    cache = DynamicCache()
    parts = ((0, 4), (4, 6), (6, 7))
    assert_layer_agrees(layer, lambda: torch.cat([layer.ours(cache, *part) for part in parts], dim=1))


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call without combining had."""
    seen: list[int] = []

    def spy(query: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return attend_to_components(query, *others)

    monkeypatch.setattr(explicit, "attend_to_components", spy)
    return seen


@pytest.mark.parametrize(("way", "backbone"), grid(WAYS, ("Llama", "Qwen3"), strength=1), indirect=["way"])
@torch.no_grad()
def test_decoding_does_without_combining(backbone: str, folded: list[int]) -> None:
    """One token, or few; a prompt, and the backends that return weights or have masks of their own, combine."""
    model = mixed_model(backbone, CASES["explicit"], backend="sdpa")
    ids, padding = tokens(2, 12), torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
    expected = mixed_model(backbone, CASES["explicit"])(ids, attention_mask=padding).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        folded.clear()
        start = model(ids[:, :9], attention_mask=padding[:, :9], past_key_values=cache).logits
        assert not folded
        one = model(ids[:, 9:10], attention_mask=padding[:, :10], past_key_values=cache).logits
        two = model(ids[:, 10:], attention_mask=padding, past_key_values=cache).logits
        assert folded == [2, 2, 4, 4]
        found = torch.cat([start, one, two], dim=1)
        assert (found - expected)[padding.bool()].abs().max() < 1e-4


@pytest.mark.compile
@pytest.mark.parametrize("way", first(WAYS), indirect=True)
@torch.no_grad()
def test_decoding_is_one_graph(folded: list[int]) -> None:
    model = mixed_model("Llama", CASES["explicit"], backend="sdpa")
    ids = tokens(2, 5)
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :4], past_key_values=cache)
        found.append(call(ids[:, 4:], past_key_values=cache).logits)
    assert folded and (found[0] - found[1]).abs().max() < 1e-5
