"""Attention to components without combining them: outputs and gradients are the oracle's, nothing large is copied."""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import oracles
from crosshead.modeling import explicit, explicit_decode, few_queries
from crosshead.modeling.eager import attention_weights, weigh_values
from crosshead.modeling.explicit_decode import Components, attend_to_components
from oracle_layers import Layer, assert_layer_agrees
from toys import CASES, mixed_model, tokens

MASKS = ("none", "left", "right", "window", "packed", "future", "nothing")


@pytest.fixture(autouse=True, params=("at once", "one by one"))
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths."""
    monkeypatch.setattr(explicit_decode, "is_quicker", lambda _: True)
    monkeypatch.setattr(explicit_decode, "LARGE", 0 if request.param == "one by one" else math.inf)


@dataclass
class Case:
    """Random sizes and tensors of one call, in float64."""

    query: torch.Tensor
    keys: Components
    values: Components
    scale: torch.Tensor | None
    allowed: torch.Tensor
    mask: torch.Tensor | None

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gradients are wanted of."""
        found = [self.query, self.keys.heads, self.values.heads, self.keys.scalars, self.values.scalars, self.scale]
        return [x for x in found if x is not None]

    def ours(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """(B, T, H, d)."""

        def of(x: Any) -> Any:
            return x if x is None or x.dtype == torch.bool else x.to(dtype)

        heads, groups = self.query.shape[1], self.groups
        rows = of(self.query).reshape(len(self.query), groups, -1, self.query.shape[-1])
        sides = [Components(of(side.heads), of(side.scalars)) for side in (self.keys, self.values)]
        output = attend_to_components(rows, *sides, of(self.scale), of(self.mask))
        return output.reshape(len(output), heads, -1, output.shape[-1]).transpose(1, 2)

    @property
    def groups(self) -> int:
        """Combined heads."""
        return len(self.keys.heads[0]) if self.keys.scalars is None else len(self.keys.scalars)

    def truth(self) -> torch.Tensor:
        """The oracle's, token by token."""
        return torch.stack([self._sequence(row) for row in range(len(self.query))])

    def _sequence(self, row: int) -> torch.Tensor:
        sides = []
        for side in (self.keys, self.values):
            seen = [[head[s] for head in side.heads[row]] for s in range(side.heads.shape[2])]
            sides.append([token if side.scalars is None else oracles.combine(token, side.scalars) for token in seen])
        if self.scale is not None:
            sides[0] = [[self.scale[row, i, 0, s] * k for i, k in enumerate(t)] for s, t in enumerate(sides[0])]
        outputs = []
        for t in range(self.query.shape[2]):
            for head in range(self.query.shape[1]):
                group = head * self.groups // self.query.shape[1]
                logits = torch.stack([self.query[row, head, t] @ key[group] for key in sides[0]])
                weights = oracles.softmax_over_allowed(logits, self.allowed[row, t])
                outputs.append(oracles.add(weights[s] * value[group] for s, value in enumerate(sides[1])))
        return torch.stack(outputs).unflatten(0, (-1, self.query.shape[1]))

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Combined, then eager attention, in a dtype."""
        key, value = (
            x.heads.to(dtype)
            if x.scalars is None
            else torch.einsum("ij,bjsd->bisd", x.scalars.to(dtype), x.heads.to(dtype))
            for x in (self.keys, self.values)
        )
        key = key if self.scale is None else key * self.scale.to(dtype).transpose(2, 3)
        mask = self.allowed[:, None]
        return weigh_values(attention_weights(self.query.to(dtype), key, mask, 1.0), value)


def visible(kind: str, batch: int, length: int, keys: int) -> torch.Tensor:
    """(B, T, S), True where a query may look: the last queries of a text, padded, packed, or in a longer buffer."""
    filled = keys - (keys // 3 if kind == "future" and keys - keys // 3 >= length else 0)
    position = torch.arange(filled - length, filled)[:, None]
    allowed = (torch.arange(keys) <= position).expand(batch, -1, -1).clone()
    for row in range(batch):
        if kind in ("left", "nothing"):
            allowed[row, :, : keys if kind == "nothing" and row else min(row + 1, keys - length)] = False
        elif kind == "right":
            allowed[row, :, max(filled - length - row, 1) : filled - length] = False
        elif kind == "window":
            allowed[row] &= torch.arange(keys) > position - 4
        elif kind == "packed":
            allowed[row, :, : (filled - length) // 2] = False
    return allowed


def make(seed: int) -> Case:
    """Everything drawn from a seed."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, groups, shared, size = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4), draw.choice((1, 3, 8))
    length, kind = draw.choice((1, 1, 1, 2, 3)), draw.choice(MASKS)
    keys = length + draw.choice((0, 1, 2, 5, 9, 16))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    def side(combined: bool) -> Components:
        heads = draw.randint(1, groups) if combined else groups
        scalars = normal(groups, heads) if combined else None
        if draw.random() < 0.5:
            return Components(normal(batch, heads, keys, size), scalars)
        wide = normal(batch, keys, heads * size + 2)[..., :-2]  # as one wide head with numbers beside
        return Components(wide.unflatten(-1, (heads, size)).transpose(1, 2), scalars)

    on = draw.choice(((True, True), (True, True), (True, False), (False, True)))
    sides = [side(combined) for combined in on]
    scale = normal(batch, groups, 1, keys).abs() + 0.1 if draw.random() < 0.4 else None
    kind = kind if length == 1 or kind != "none" else "window"
    allowed = visible(kind, batch, length, keys)
    mask: torch.Tensor | None = allowed[:, None]
    if kind == "none":
        mask = None
    elif draw.random() < 0.5:
        hidden = -math.inf if allowed.any(-1).all() and draw.random() < 0.5 else torch.finfo(torch.float64).min
        mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, hidden)[:, None]
    query = 2 * normal(batch, groups * shared, length, size)
    return Case(query, *sides, scale, allowed, mask)


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


@pytest.mark.parametrize("first", (0, pytest.param(50, marks=pytest.mark.slow)))
def test_random_shapes(first: int) -> None:
    for seed in range(first, 50 if first == 0 else 600):
        assert_agrees(make(seed))


@torch.no_grad()
def test_single_precision_without_gradients() -> None:
    """As in decoding, where other products may be made; each shape for itself."""
    for seed in range(500):
        case = make(seed)
        seen, found, exact = case.allowed.any(-1), case.ours(torch.float32), case.plain(torch.float64)
        assert found.isfinite().all()
        torch.testing.assert_close(found[seen].double(), exact[seen], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_half_precision_is_as_close_as_eager_attention() -> None:
    """Over many shapes, for outputs alone can be lucky."""
    ours, eager = [], []
    for seed in range(500):
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
    """As many as are worth it."""
    made: list[int] = []
    monkeypatch.setattr(few_queries, "product", lambda x, y: made.append(len(x)) or x @ y.t())
    monkeypatch.setattr(explicit_decode, "LARGE", 3 * 40 * 2 * 4)
    for length in (39, 40):
        side = Components(torch.randn(2, 2, length, 4), torch.randn(3, 2))
        attend_to_components(torch.randn(2, 3, 1, 4), side, side, None, None)
        assert made == ([] if length == 39 else [40, 40, 3, 3])


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3"))
@pytest.mark.parametrize("on", (["key", "value"], ["key"], ["value"]))
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


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3"))
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
