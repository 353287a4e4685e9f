"""`talking`'s kernels, in Triton's interpreter: against the plain computation in float64, and against the oracle."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` runs these tests with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is off: `make test-triton` runs these tests with it", allow_module_level=True)

import triton.language as tl

import oracle_layers
from crosshead.modeling import talking_operator, talking_triton
from crosshead.modeling.mixer import AttentionCall, HeadLayout, HeadStates
from crosshead.modeling.talking import DYNAMIC, Talking
from crosshead.modeling.talking_blocks import TalkingCall, attend_in_blocks
from crosshead.modeling.talking_triton import Tile, attend_in_tiles, fits
from oracle_layers import OPTION_CASES, Layer, assert_layer_agrees
from toys import lopsided, mixed_model, tokens

HIDDEN = 6
STAGES = (["logits", "weights"], ["logits"], ["weights"])
TALKING = {name: mixers for name, mixers in OPTION_CASES.items() if "talking" in mixers}


class Drawn:
    """A random attention call of at least two queries, in float64."""

    def __init__(self, seed: int) -> None:
        draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.groups = draw.choice((1, 2)), draw.choice((1, 2, 3))
        self.heads, self.size = self.groups * draw.choice((1, 1, 2, 3, 6)), draw.choice((2, 5, 20))
        self.queries = draw.choice((2, 3, 16, 17, 33, draw.randint(2, 40)))
        self.keys = self.queries + draw.choice((0, 0, 4))
        on = draw.choice(STAGES)
        softmax_heads = draw.choice((self.heads, 1, self.heads + 1)) if len(on) == 2 else self.heads
        allowed = [name for name in DYNAMIC if name.split("_")[1] in on]
        dynamic = draw.sample(allowed, draw.choice((0, 0, 1, len(allowed))))
        layout = HeadLayout(HIDDEN, self.heads, self.groups, self.size, output_heads=self.heads)
        settings = {"on": on, "softmax_heads": softmax_heads, "dynamic": dynamic}
        self.module: Any = lopsided(Talking(layout, settings)).double()
        self.inputs = {
            "hidden": self.normal(self.batch, self.queries, HIDDEN),
            "memory": self.normal(self.batch, self.keys, HIDDEN),
            "query": self.normal(self.batch, self.queries, self.heads, self.size).transpose(1, 2),
            "key": self.normal(self.batch, self.groups, self.keys, self.size),
            "value": self.normal(self.batch, self.groups, self.keys, self.size),
        }
        self.causal = draw.random() < 0.7
        self.mask = MASKS[draw.choice(list(MASKS))](self)
        if self.mask is not None and draw.random() < 0.4:
            self.mask = self.normal(*self.mask.shape).float().masked_fill(~self.mask, torch.finfo(torch.float32).min)
        self.direction = self.normal(self.batch, self.queries, self.heads, self.size)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def run(self, eager: bool, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """The output and all gradients; eager attention gets the mask that the other one implies."""
        inputs = {name: x.to(dtype, copy=True).requires_grad_() for name, x in self.inputs.items()}
        module, mask = self.module.to(dtype), self.mask
        if mask is None and eager and self.causal:
            mask = torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool).tril()
        states = HeadStates(**inputs)
        module.on_projected(states)
        call = AttentionCall(_unused, eager, mask, self.size**-0.5, 0.0, causal=self.causal)
        output, weights = module.attend(states, call)
        assert (weights is None) is not eager
        leaves = inputs | dict(module.named_parameters())
        found = torch.autograd.grad(output, list(leaves.values()), self.direction.to(dtype), allow_unused=True)
        return {"output": output.detach()} | {
            name: torch.zeros_like(leaves[name]) if grad is None else grad
            for name, grad in zip(leaves, found, strict=True)
        }


def _unused(*_: torch.Tensor) -> Any:
    raise NotImplementedError


def _causal(drawn: Drawn) -> torch.Tensor:
    """(1, 1, T, S), the last query sees every key."""
    return torch.ones(1, 1, drawn.queries, drawn.keys, dtype=torch.bool).tril(drawn.keys - drawn.queries)


def _padded(drawn: Drawn, left: bool) -> torch.Tensor:
    counts = torch.randint(0, drawn.keys, (drawn.batch, 1), generator=drawn.generator)
    real = torch.arange(drawn.keys) >= counts
    return _causal(drawn) & (real if left else real.flip(1))[:, None, None, :]


def _packed(drawn: Drawn) -> torch.Tensor:
    document = (torch.rand(drawn.batch, drawn.keys, generator=drawn.generator) < 0.2).cumsum(-1)
    return _causal(drawn) & (document[:, None, -drawn.queries :, None] == document[:, None, None, :])


MASKS: dict[str, Callable[[Drawn], torch.Tensor | None]] = {
    "none": lambda drawn: None,
    "causal": _causal,
    "padding on the left": lambda drawn: _padded(drawn, True),
    "padding on the right": lambda drawn: _padded(drawn, False),
    "documents": _packed,
    "window": lambda drawn: _causal(drawn).triu(drawn.keys - drawn.queries - 5),
    "by head": lambda drawn: drawn.normal(1, drawn.module.sizes["logits"][0], drawn.queries, drawn.keys) > 0,
    "nothing": lambda drawn: torch.zeros(drawn.batch, 1, 1, drawn.keys, dtype=torch.bool),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TalkingCall]:
    """As on a GPU; the kernels compute in float32 when they are given float64."""
    calls: list[TalkingCall] = []

    def narrowed(call: TalkingCall) -> torch.Tensor:
        calls.append(call)
        if call.query.dtype != torch.float64:
            return attend_in_tiles(call)
        names = ("query", "key", "value", "logits_map", "logits_key_map", "weights_map", "weights_key_map")
        parts = {name: getattr(call, name) for name in names}
        call = replace(call, **{name: None if x is None else x.float() for name, x in parts.items()})
        return attend_in_tiles(call).double()

    monkeypatch.setattr(talking_triton, "attend_in_tiles", narrowed)
    monkeypatch.setattr(talking_operator, "runs_triton", lambda x: True)
    monkeypatch.setattr(oracle_layers, "OUTPUT_TOLERANCE", 3e-5)
    monkeypatch.setattr(oracle_layers, "GRADIENT_TOLERANCE", 3e-4)
    # NumPy, which the interpreter computes with, has no bfloat16 to multiply.
    monkeypatch.setitem(talking_triton.FACTORS, torch.bfloat16, tl.float32)
    rows = [(heads, own, size) for heads in (16, 32) for own in (False, True) for size in (2, 4, 8)]
    monkeypatch.setattr(talking_triton, "TILES", dict.fromkeys(rows, Tile(16, 16, 16, 16, 1)))
    return calls


def agree(seeds: range, asked: list[TalkingCall]) -> None:
    """Outputs and gradients."""
    for seed in seeds:
        drawn = Drawn(seed)
        expected, found = drawn.run(eager=True), drawn.run(eager=False, dtype=torch.float32)
        for name, wanted in expected.items():
            assert (found[name] - wanted).abs().max() < 3e-5 * (1 + wanted.abs().max()), (seed, name)
    assert len(asked) == len(seeds)


def test_random_calls_agree_with_the_plain_computation(asked: list[TalkingCall]) -> None:
    agree(range(150), asked)


@pytest.mark.slow
def test_many_random_calls_agree_with_the_plain_computation(asked: list[TalkingCall]) -> None:
    agree(range(150, 500), asked)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("seed", range(12))
def test_half_precision_is_as_near_as_the_plain_computation(
    seed: int, dtype: torch.dtype, asked: list[TalkingCall]
) -> None:
    drawn = Drawn(1000 + seed)
    exact = drawn.run(eager=True)
    plain, found = (drawn.run(eager, dtype) for eager in (True, False))
    for name, wanted in exact.items():
        assert found[name].dtype == dtype
        scale = wanted.norm() + 1e-3
        assert (found[name] - wanted).norm() < 1.5 * (plain[name] - wanted).norm() + 0.02 * scale, name
    assert len(asked) == 1


@pytest.mark.parametrize("heads", (16, 17, 32))
def test_many_heads(heads: int, asked: list[TalkingCall]) -> None:
    query, key, value = (torch.randn(1, heads, 20, 4) for _ in range(3))
    maps = torch.randn(2, 1, 1, heads, heads) / heads**0.5
    call = TalkingCall(query, key, value, maps[0], None, maps[1], None, None, 0.5, True)
    torch.testing.assert_close(attend_in_tiles(call), attend_in_blocks(call), rtol=1e-4, atol=1e-5)


def test_too_many_heads_are_left_to_the_blocks() -> None:
    for heads, fit in ((32, True), (33, False)):
        query, maps = torch.zeros(1, heads, 4, 4).bfloat16(), torch.zeros(1, 1, heads, heads)
        assert fits(TalkingCall(query, query, query, maps, None, maps, None, None, 0.5, True)) is fit


def test_keys_that_no_query_sees_are_not_read() -> None:
    """What hides behind a mask may be anything; here it would spoil every sum."""
    query, key, value = (torch.randn(1, 2, 64, 16) for _ in range(3))
    key[:, :, :32] = value[:, :, :32] = torch.nan
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril() & (torch.arange(64) >= 32)
    maps = torch.randn(2, 1, 1, 2, 2)
    of_maps = (maps[0], None, maps[1], None)
    found = attend_in_tiles(TalkingCall(query[:, :, 32:], key, value, *of_maps, mask[:, :, 32:], 0.5, True))
    alone = TalkingCall(*(x[:, :, 32:] for x in (query, key, value)), *of_maps, None, 0.5, True)
    torch.testing.assert_close(found, attend_in_blocks(alone))


@pytest.mark.parametrize("padding", ((0, 2), None))
@pytest.mark.parametrize("heads", ((4, 2), (4, 4)))
@pytest.mark.parametrize("case", TALKING)
def test_layer(case: str, heads: tuple[int, int], padding: tuple[int, int] | None, asked: list[TalkingCall]) -> None:
    """Against the oracle, with a mask and without."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    layer = Layer("Qwen3", TALKING[case], padding or (0, 0), **sizes)
    layer.attention.config._attn_implementation = "sdpa"
    mask = None if padding is None else layer.allowed[:, None]

    def run() -> torch.Tensor:
        output, _ = layer.attention(layer.inputs, (layer.cos, layer.sin), mask)
        return output

    assert_layer_agrees(layer, run)
    assert len(asked) == 1


@pytest.mark.compile
def test_a_compiled_step_keeps_one_graph(asked: list[TalkingCall]) -> None:
    model = mixed_model("Llama", {"talking": {}}, "sdpa").train()
    ids, parameters = tokens(), [*model.parameters()]
    expected = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, parameters)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(ids, labels=ids, use_cache=False).loss, parameters)
    torch.compiler.reset()
    assert len(asked) == 4
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
