"""Talking-Heads in blocks against the plain computation: outputs, gradients, masks, and no tensor of all pairs."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosshead.modeling import query_blocks, talking
from crosshead.modeling.mechanisms.base import AttentionCall, HeadStates
from crosshead.modeling.talking_blocks import TalkingCall, attend_in_blocks
from crosshead.modeling.talking_gradients import gradients_in_blocks
from talking_cases import Drawn, Ranges, unused
from tiers import first

RANGES = Ranges(batches=(1, 2, 3), shared=(1, 2, 3), features=(2, 5), lengths=(1, 2, 3, 5, 8, 13, 17, 21))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_blocks, "LARGEST_BLOCK", 4)
    monkeypatch.setattr(query_blocks, "SMALLEST_BLOCK", 1)


@pytest.mark.parametrize("seeds", first([range(30), range(30, 800)]))
def test_random_calls_agree_with_the_plain_computation(seeds: range) -> None:
    """Outputs and gradients, in float64 to rounding."""
    for seed in seeds:
        Drawn(seed, RANGES).agrees(torch.float64, 1e-10)


@pytest.mark.parametrize("seed", first(range(12), 3))
def test_half_precision_is_as_near_as_the_plain_computation(seed: int) -> None:
    Drawn(seed, RANGES).is_as_near(torch.bfloat16)


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
    heads, length = 8, 96
    query, key, value, grad = (torch.randn(1, heads, length, 4) for _ in range(4))
    maps = torch.randn(2, 1, 1, heads, heads)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if masked else None
    call = TalkingCall(query, key, value, maps[0], None, maps[1], None, mask, 0.5, True)
    with Largest() as forward:
        attend_in_blocks(call)
    with Largest() as backward:
        gradients_in_blocks(call, grad.transpose(1, 2))
    for largest in (forward.numbers, backward.numbers):
        assert largest <= heads * 4 * 4 * length  # the memory of the blocks: at most four, of four queries each


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
    drawn = Drawn(3, RANGES)
    states = HeadStates(**drawn.inputs)
    drawn.module.on_projected(states)
    call = AttentionCall(unused, False, None, 1.0, 0.5)
    output, weights = drawn.module.train().attend(states, call)
    assert weights is None
    first, _ = drawn.module.eval().attend(states, call)
    alone = {name: x[..., :1, :] if name in ("query", "hidden") else x for name, x in drawn.inputs.items()}
    seen = {name: x[..., :1, :] if name in ("key", "value", "memory") else x for name, x in alone.items()}
    states = HeadStates(**seen)
    drawn.module.on_projected(states)
    single, _ = drawn.module.attend(states, AttentionCall(unused, False, None, 1.0, 0.0))
    torch.testing.assert_close(single, first[:, :1])  # the first query sees the first key alone
    assert not torch.equal(output, first)
