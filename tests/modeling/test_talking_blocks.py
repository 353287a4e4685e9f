"""Talking-Heads in blocks against a plain computation: outputs, gradients, masks, launches, memory, the compiler."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosshead.modeling.mechanisms import talking_blocks as module
from crosshead.modeling.mechanisms.talking_blocks import talking_blocks
from tiers import first

SCALING = 0.7
BLOCK_SIZES = ((1, 4), (2, 3), (3, 5), (3, 64), (2, 1))
"""Sequences and queries of a block."""


@dataclass
class Call:
    """A random call in float64."""

    tensors: list[torch.Tensor | None]
    mask: torch.Tensor | None
    causal: bool
    direction: torch.Tensor

    def run(self, operator: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """The output and the gradients of all tensors; maps have the widened dtype."""
        dtypes = [dtype] * 3 + [torch.promote_types(dtype, torch.float32)] * 4
        given = [
            None if x is None else x.to(kind, copy=True).requires_grad_()
            for x, kind in zip(self.tensors, dtypes, strict=True)
        ]
        output = operator(*given, self.mask, SCALING, self.causal)
        leaves = [x for x in given if x is not None]
        return [output.detach(), *torch.autograd.grad(output, leaves, self.direction.to(dtype))]


def drawn(seed: int) -> Call:
    """Grouped heads, three head counts, maps of all kinds, every kind of mask."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, groups = draw.choice((1, 2, 3)), draw.choice((1, 2))
    heads, softmax, outputs = groups * draw.choice((1, 2, 3)), draw.choice((1, 2, 5)), groups * draw.choice((1, 2))
    queries, size, features = draw.choice((2, 5, 8, 13, 21)), draw.choice((2, 3)), draw.choice((2, 5))
    keys = queries + draw.choice((0, 0, 4, -1))

    def maps(to: int, source: int) -> list[torch.Tensor | None]:
        static = normal(draw.choice((1, batch)), draw.choice((1, queries)), to, source)
        return [static, normal(batch, keys, to, source) if draw.random() < 0.4 else None]

    query = normal(batch, queries, heads, size).transpose(1, 2)
    tensors = [query, normal(batch, groups, keys, size), normal(batch, groups, keys, features)]
    shape = (draw.choice((1, batch)), draw.choice((1, softmax)), draw.choice((1, queries)), keys)
    mask = MASKS[draw.choice(list(MASKS))](torch.rand(shape, generator=generator), normal(*shape))
    direction = normal(batch, queries, outputs, features)
    return Call([*tensors, *maps(softmax, heads), *maps(outputs, softmax)], mask, draw.random() < 0.7, direction)


def additive(chosen: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    return added.float().masked_fill(chosen > 0.7, torch.finfo(torch.float32).min)


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "none": lambda chosen, added: None,
    "most keys": lambda chosen, added: chosen > 0.3,
    "few keys, so that some queries see none": lambda chosen, added: chosen > 0.85,
    "no key": lambda chosen, added: chosen > 2,
    "window": lambda chosen, added: (chosen >= 0).tril(1).triu(-2),
    "additive": additive,
}


def plain(*call: Any) -> torch.Tensor:
    """The definition, in the dtype of the arguments."""
    query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal = call
    shared, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    logits = torch.einsum("bhtd,bhsd->bhts", query, key.repeat_interleave(shared, 1)).to(wide) * scaling
    logits = mapped(logits_map, logits_key_map, logits)
    if mask is None and causal:
        mask = torch.ones(logits.shape[2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(wide).min)
    elif mask is not None:
        logits = logits + mask
    weights = mapped(weights_map, weights_key_map, logits.softmax(-1)).to(value.dtype)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return torch.einsum("bhts,bhsd->bthd", weights, value)


def mapped(maps: torch.Tensor, key_maps: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor:
    (batch, _, queries, _), sizes = given.shape, maps.shape[2:]
    result = torch.einsum("btij,bjts->bits", maps.expand(batch, queries, *sizes), given)
    return result if key_maps is None else result + torch.einsum("bsij,bjts->bits", key_maps, given)


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Makes blocks of so many sequences and queries at most."""

    def choose(size: tuple[int, int]) -> None:
        def chosen(device: str, batch: int, queries: int, row: int) -> tuple[int, int]:
            return min(size[0], batch), min(size[1], queries)

        monkeypatch.setattr(module, "talking_block_size", chosen)

    return choose


@pytest.mark.parametrize("seeds", first([range(40), range(40, 800)]))
def test_random_calls_agree_with_the_plain_computation(seeds: range, sized: Any) -> None:
    """Outputs and gradients, in float64 to rounding."""
    for seed in seeds:
        call = drawn(seed)
        expected = call.run(plain)
        sized(BLOCK_SIZES[seed % len(BLOCK_SIZES)])
        for found, wanted in zip(call.run(talking_blocks), expected, strict=True):
            assert (found - wanted).abs().max() < 1e-10 * (1 + wanted.abs().max()), seed


@pytest.mark.parametrize("seed", first(range(12), 4))
def test_half_precision_is_as_near_as_the_plain_computation(seed: int, sized: Any) -> None:
    call = drawn(seed)
    sized((2, 4))
    exact, near = call.run(plain), call.run(plain, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call.run(talking_blocks, torch.bfloat16)
    for wanted, other, ours in zip(exact, near, found, strict=True):
        assert ours.dtype == other.dtype
        bound = 1.5 * (other - wanted).norm() + 0.02 * (wanted.norm() + 1e-3)
        assert (ours - wanted).norm() < bound


def test_a_masked_block_of_another_device_is_the_same_without_reading_the_mask(
    sized: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There every block meets all keys and may be blind."""
    sized((2, 4))
    calls = [call for call in map(drawn, range(60)) if call.mask is not None]
    expected = [call.run(talking_blocks) for call in calls]
    monkeypatch.setattr(module, "talking_mask_span", lambda mask: (slice(0, mask.shape[-1]), mask.dtype == torch.bool))
    for call, wanted in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.run(talking_blocks), wanted, rtol=1e-10, atol=1e-10)


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    window = torch.ones(1, 12, 1, 12, dtype=torch.bool).transpose(1, 2).tril().triu(-2).transpose(1, 2)
    assert [module.talking_mask_span(window[:, start : start + 4]) for start in (0, 4, 8)] == [
        (slice(0, 4), False),
        (slice(2, 8), False),
        (slice(6, 12), False),
    ]
    window[:, 5] = False
    assert module.talking_mask_span(window[:, 4:8]) == (slice(0, 12), True)


def test_block_sizes() -> None:
    """Those of the long case on the CPU, short sequences there, and the launches' case on a GPU."""
    heads = 16
    assert module.talking_block_size("cpu", 2, 4096, 2 * heads * 4096) == (1, 64)
    assert module.talking_block_size("cpu", 2, 10**6, 2 * heads * 10**6) == (1, 16)
    assert module.talking_block_size("cpu", 8, 32, 2 * 4 * 32) == (8, 32)
    assert module.talking_block_size("cuda", 8, 2048, 4 * 32 * 2048) == (8, 128)
    assert module.talking_block_size("cuda", 8, 32_768, 4 * 32 * 32_768) == (1, 64)


class Watch(TorchDispatchMode):
    """Counts what a GPU would be asked to compute, and the most numbers that one tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.launches += not (func.is_view or "empty" in func.name())
        tensors = result if isinstance(result, (list, tuple)) else [result]
        made = [x.untyped_storage().nbytes() // 4 for x in tensors if isinstance(x, torch.Tensor)]
        self.numbers = max([self.numbers, *made])
        return result


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("groups", (8, 32))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_gpu_launches_few_kernels_and_waits_for_none(masked: bool, groups: int, dtype: torch.dtype) -> None:
    """Meta tensors have no numbers, so that reading one would be an error."""
    batch, heads, length, size = 8, 32, 2048, 64

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    maps = empty(1, 1, heads, heads, dtype=torch.float32)
    mask = empty(batch, 1, length, length, dtype=torch.bool) if masked else None
    key = empty(batch, groups, length, size)
    tensors = [empty(batch, heads, length, size), key, key, maps, None, maps, None, mask]
    with Watch() as forward:
        output = module.talking_forward(*tensors, SCALING, True)
    with Watch() as backward:
        module.talking_backward(output, tensors, SCALING, True)
    assert forward.launches <= 150
    assert backward.launches <= 600
    assert max(forward.numbers, backward.numbers) <= 2**28  # 1 GB


@pytest.mark.parametrize("masked", (False, True))
def test_memory_grows_linearly_with_the_length(masked: bool, sized: Any) -> None:
    sized((1, 4))
    heads, numbers = 8, []
    for length in (96, 192):
        query, key, value = torch.randn(3, 1, heads, length, 4)
        maps = torch.randn(1, 1, heads, heads)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if masked else None
        tensors = [query, key, value, maps, None, maps, None, mask]
        with Watch() as peak:
            output = module.talking_forward(*tensors, SCALING, True)
            module.talking_backward(output, tensors, SCALING, True)
        assert peak.numbers <= heads * 4 * 4 * length  # the memory of the blocks: at most four, of four queries each
        numbers.append(peak.numbers)
    assert numbers[1] == 2 * numbers[0]


@pytest.mark.parametrize("seed", first(range(6), 2))
def test_the_operators_keep_their_contract(seed: int, sized: Any) -> None:
    call = drawn(seed)
    sized((2, 4))
    tensors = [None if x is None else x.requires_grad_() for x in call.tensors]
    torch.library.opcheck(talking_blocks, (*tensors, call.mask, SCALING, call.causal))
    given = [None if x is None else x.detach() for x in [*tensors, call.mask]]
    torch.library.opcheck(module.talking_gradients, (call.direction, given, SCALING, call.causal))


@pytest.mark.compile
@pytest.mark.parametrize("seed", first(range(4)))
def test_compiled_and_exported_calls_are_the_same(seed: int) -> None:
    call = drawn(seed)
    expected = call.run(talking_blocks)
    compiled = torch.compile(lambda *arguments: talking_blocks(*arguments), fullgraph=True)
    torch.testing.assert_close(call.run(compiled), expected)

    class Attention(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor | None) -> torch.Tensor:
            return talking_blocks(*tensors, SCALING, call.causal)

    arguments = (*call.tensors, call.mask)
    torch.testing.assert_close(torch.export.export(Attention(), arguments).module()(*arguments), expected[0])
