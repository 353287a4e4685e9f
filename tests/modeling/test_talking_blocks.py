"""Talking-Heads in blocks against the plain computation: outputs, gradients, masks, and no tensor of all pairs."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosshead.modeling import query_blocks, talking
from crosshead.modeling.mixer import AttentionCall, HeadLayout, HeadStates
from crosshead.modeling.talking import DYNAMIC, Talking
from crosshead.modeling.talking_blocks import TalkingCall, attend_in_blocks
from crosshead.modeling.talking_gradients import gradients_in_blocks
from toys import lopsided

HIDDEN = 6
STAGES = (["logits", "weights"], ["logits"], ["weights"])
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 21)


class Drawn:
    """A random attention call, in float64."""

    def __init__(self, seed: int) -> None:
        draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.groups = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
        self.heads, self.size = self.groups * draw.choice((1, 2, 3)), draw.choice((2, 5))
        self.queries = draw.choice(LENGTHS)
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
            "query": self.normal(self.batch, self.heads, self.queries, self.size),
            "key": self.normal(self.batch, self.groups, self.keys, self.size),
            "value": self.normal(self.batch, self.groups, self.keys, self.size),
        }
        self.causal = draw.random() < 0.7
        self.mask = MASKS[draw.choice(list(MASKS))](self)
        if self.mask is not None and draw.random() < 0.4:
            self.mask = torch.zeros(self.mask.shape).masked_fill(~self.mask, torch.finfo(torch.float32).min)
        self.direction = self.normal(self.batch, self.queries, self.heads, self.size)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def run(self, eager: bool, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """The output and all gradients; eager attention gets the mask that the other one implies."""
        inputs = {name: x.to(dtype, copy=True).requires_grad_() for name, x in self.inputs.items()}
        module, mask = self.module.to(dtype), self.mask
        if mask is None and eager and self.causal and self.queries > 1:
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
    places = torch.arange(drawn.keys)
    counts = torch.randint(0, drawn.keys, (drawn.batch, 1), generator=drawn.generator)
    real = places >= counts if left else places < drawn.keys - counts
    return _causal(drawn) & real[:, None, None, :]


def _packed(drawn: Drawn) -> torch.Tensor:
    document = torch.randint(0, 2, (drawn.batch, drawn.keys), generator=drawn.generator).cumsum(-1)
    same = document[:, None, -drawn.queries :, None] == document[:, None, None, :]
    return _causal(drawn) & same


MASKS: dict[str, Callable[[Drawn], torch.Tensor | None]] = {
    "none": lambda drawn: None,
    "causal": _causal,
    "padding on the left": lambda drawn: _padded(drawn, True),
    "padding on the right": lambda drawn: _padded(drawn, False),
    "documents": _packed,
    "window": lambda drawn: _causal(drawn).triu(drawn.keys - drawn.queries - 2),
    "by head": lambda drawn: drawn.normal(1, drawn.module.sizes["logits"][0], drawn.queries, drawn.keys) > 0,
    "nothing": lambda drawn: torch.zeros(drawn.batch, 1, 1, drawn.keys, dtype=torch.bool),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_blocks, "LARGEST_BLOCK", 4)
    monkeypatch.setattr(query_blocks, "SMALLEST_BLOCK", 1)


def agree(seeds: range) -> None:
    """Outputs and gradients, in float64 to rounding."""
    for seed in seeds:
        drawn = Drawn(seed)
        found, expected = drawn.run(eager=False), drawn.run(eager=True)
        for name, wanted in expected.items():
            assert (found[name] - wanted).abs().max() < 1e-10 * (1 + wanted.abs().max()), (seed, name)


def test_random_calls_agree_with_the_plain_computation() -> None:
    agree(range(150))


@pytest.mark.slow
def test_many_random_calls_agree_with_the_plain_computation() -> None:
    agree(range(150, 800))


@pytest.mark.parametrize("seed", range(12))
def test_half_precision_is_as_near_as_the_plain_computation(seed: int) -> None:
    drawn = Drawn(seed)
    exact = drawn.run(eager=True)
    plain, found = (drawn.run(eager, torch.bfloat16) for eager in (True, False))
    for name, wanted in exact.items():
        assert found[name].dtype == torch.bfloat16
        scale = wanted.norm() + 1e-3
        assert (found[name] - wanted).norm() < 1.5 * (plain[name] - wanted).norm() + 0.02 * scale, name


class Largest(TorchDispatchMode):
    """The most numbers that one tensor had of all that were made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (list, tuple)) else [result]
        self.numbers = max(
            [self.numbers, *(x.untyped_storage().nbytes() // 4 for x in tensors if hasattr(x, "numel"))]
        )
        return result


@pytest.mark.parametrize("masked", (False, True))
@torch.no_grad()
def test_no_tensor_has_all_queries_and_all_keys_of_all_heads(masked: bool) -> None:
    heads, length = 8, 256
    query, key, value, grad = (torch.randn(1, heads, length, 4) for _ in range(4))
    maps = torch.randn(2, 1, 1, heads, heads)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if masked else None
    call = TalkingCall(query, key, value, maps[0], None, maps[1], None, mask, 0.5, True)
    with Largest() as forward:
        attend_in_blocks(call)
    with Largest() as backward:
        gradients_in_blocks(call, grad.transpose(1, 2))
    for largest in (forward.numbers, backward.numbers):
        assert largest <= heads * length * length / 16  # the memory of the blocks: at most four, of four queries each


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    window = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril().triu(-2)
    blocks = query_blocks.query_blocks(1, 12, 12, 4, window, causal=True)
    assert [(block.keys.start, block.keys.stop) for block in blocks] == [(0, 4), (2, 8), (6, 12)]
    window[:, :, 5] = False
    blocks = query_blocks.query_blocks(1, 12, 12, 4, window, causal=True)
    assert [(block.keys.start, block.keys.stop) for block in blocks] == [(0, 4), (0, 12), (6, 12)]


def test_dropout_and_single_queries_take_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("blocks")

    monkeypatch.setattr(talking, "talking_attention", refuse)
    drawn = Drawn(3)
    states = HeadStates(**drawn.inputs)
    drawn.module.on_projected(states)
    call = AttentionCall(_unused, False, None, 1.0, 0.5)
    output, weights = drawn.module.train().attend(states, call)
    assert weights is None
    first, _ = drawn.module.eval().attend(states, call)
    alone = {name: x[..., :1, :] if name in ("query", "hidden") else x for name, x in drawn.inputs.items()}
    seen = {name: x[..., :1, :] if name in ("key", "value", "memory") else x for name, x in alone.items()}
    states = HeadStates(**seen)
    drawn.module.on_projected(states)
    single, _ = drawn.module.attend(states, AttentionCall(_unused, False, None, 1.0, 0.0))
    torch.testing.assert_close(single, first[:, :1])  # the first query sees the first key alone
    assert not torch.equal(output, first)
