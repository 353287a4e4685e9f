"""Blockwise Talking-Heads attention compared with a plain one: outputs, gradients, launches, memory, compilation."""

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
"""Maximum sequences and queries per block."""


@dataclass
class Call:
    """A random attention call in float64."""

    tensors: list[torch.Tensor | None]
    mask: torch.Tensor | None
    causal: bool
    direction: torch.Tensor

    def run(self, operator: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """Return the output and the gradients of all tensors; head maps are at least in float32."""
        dtypes = [dtype] * 3 + [torch.promote_types(dtype, torch.float32)] * 4
        tensors = [
            None if x is None else x.to(kind, copy=True).requires_grad_()
            for x, kind in zip(self.tensors, dtypes, strict=True)
        ]
        output = operator(*tensors, self.mask, SCALING, self.causal)
        leaves = [x for x in tensors if x is not None]
        return [output.detach(), *torch.autograd.grad(output, leaves, self.direction.to(dtype))]


def random_call(seed: int) -> Call:
    """Return a random call: grouped heads, three head counts, static and dynamic maps, any kind of mask."""
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


def additive_mask(chosen: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    return added.float().masked_fill(chosen > 0.7, torch.finfo(torch.float32).min)


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "none": lambda chosen, added: None,
    "most keys": lambda chosen, added: chosen > 0.3,
    "few keys, so that some queries see none": lambda chosen, added: chosen > 0.85,
    "no key": lambda chosen, added: chosen > 2,
    "window": lambda chosen, added: (chosen >= 0).tril(1).triu(-2),
    "additive": additive_mask,
}


def reference_attention(*call: Any) -> torch.Tensor:
    """Return the output by the definition of Talking-Heads attention, in the dtype of the arguments."""
    query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal = call
    shared, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    logits = torch.einsum("bhtd,bhsd->bhts", query, key.repeat_interleave(shared, 1)).to(wide) * scaling
    logits = map_heads(logits_map, logits_key_map, logits)
    if mask is None and causal:
        mask = torch.ones(logits.shape[2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(wide).min)
    elif mask is not None:
        logits = logits + mask
    weights = map_heads(weights_map, weights_key_map, logits.softmax(-1)).to(value.dtype)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return torch.einsum("bhts,bhsd->bthd", weights, value)


def map_heads(maps: torch.Tensor, key_maps: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    (batch, _, queries, _), sizes = scores.shape, maps.shape[2:]
    result = torch.einsum("btij,bjts->bits", maps.expand(batch, queries, *sizes), scores)
    return result if key_maps is None else result + torch.einsum("bsij,bjts->bits", key_maps, scores)


@pytest.fixture
def set_block_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Return a function that sets the maximum number of sequences and queries per block."""

    def choose(size: tuple[int, int]) -> None:
        def chosen(device: str, batch: int, queries: int, row: int) -> tuple[int, int]:
            return min(size[0], batch), min(size[1], queries)

        monkeypatch.setattr(module, "talking_block_size", chosen)

    return choose


@pytest.mark.parametrize("seeds", first([range(40), range(40, 800)]))
def test_random_calls_equal_reference_attention(seeds: range, set_block_size: Any) -> None:
    """Compares outputs and gradients in float64, up to rounding."""
    for seed in seeds:
        call = random_call(seed)
        expected = call.run(reference_attention)
        set_block_size(BLOCK_SIZES[seed % len(BLOCK_SIZES)])
        for result, reference in zip(call.run(talking_blocks), expected, strict=True):
            assert (result - reference).abs().max() < 1e-10 * (1 + reference.abs().max()), seed


@pytest.mark.parametrize("seed", first(range(12), 4))
def test_bfloat16_is_as_accurate_as_reference_attention(seed: int, set_block_size: Any) -> None:
    call = random_call(seed)
    set_block_size((2, 4))
    exact, plain_half = call.run(reference_attention), call.run(reference_attention, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        blocks = call.run(talking_blocks, torch.bfloat16)
    for reference, other, ours in zip(exact, plain_half, blocks, strict=True):
        assert ours.dtype == other.dtype
        bound = 1.5 * (other - reference).norm() + 0.02 * (reference.norm() + 1e-3)
        assert (ours - reference).norm() < bound


def test_results_do_not_depend_on_mask_span(set_block_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices every block attends to all keys, and some of its queries may have no visible key."""
    set_block_size((2, 4))
    calls = [call for call in map(random_call, range(60)) if call.mask is not None]
    expected = [call.run(talking_blocks) for call in calls]
    monkeypatch.setattr(module, "talking_mask_span", lambda mask: (slice(0, mask.shape[-1]), mask.dtype == torch.bool))
    for call, reference in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.run(talking_blocks), reference, rtol=1e-10, atol=1e-10)


def test_mask_span_excludes_keys_hidden_from_block() -> None:
    window = torch.ones(1, 12, 1, 12, dtype=torch.bool).transpose(1, 2).tril().triu(-2).transpose(1, 2)
    assert [module.talking_mask_span(window[:, start : start + 4]) for start in (0, 4, 8)] == [
        (slice(0, 4), False),
        (slice(2, 8), False),
        (slice(6, 12), False),
    ]
    window[:, 5] = False
    assert module.talking_mask_span(window[:, 4:8]) == (slice(0, 12), True)


def test_block_size_on_cpu_and_gpu() -> None:
    """Covers long and short sequences on the CPU, and on a GPU the case of the kernel launch test and a longer one."""
    heads = 16
    assert module.talking_block_size("cpu", 2, 4096, 2 * heads * 4096) == (1, 64)
    assert module.talking_block_size("cpu", 2, 10**6, 2 * heads * 10**6) == (1, 16)
    assert module.talking_block_size("cpu", 8, 32, 2 * 4 * 32) == (8, 32)
    assert module.talking_block_size("cuda", 8, 2048, 4 * 32 * 2048) == (8, 128)
    assert module.talking_block_size("cuda", 8, 32_768, 4 * 32 * 32_768) == (1, 64)


class LaunchRecorder(TorchDispatchMode):
    """Counts the kernel launches that a GPU would need, and records the largest number of elements of a tensor."""

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
def test_gpu_launches_few_kernels_without_synchronisation(masked: bool, groups: int, dtype: torch.dtype) -> None:
    """Runs on meta tensors, which have no data: a device synchronisation would raise an error."""
    batch, heads, length, size = 8, 32, 2048, 64

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    maps = empty(1, 1, heads, heads, dtype=torch.float32)
    mask = empty(batch, 1, length, length, dtype=torch.bool) if masked else None
    key = empty(batch, groups, length, size)
    tensors = [empty(batch, heads, length, size), key, key, maps, None, maps, None, mask]
    with LaunchRecorder() as forward:
        output = module.talking_forward(*tensors, SCALING, True)
    with LaunchRecorder() as backward:
        module.talking_backward(output, tensors, SCALING, True)
    assert forward.launches <= 150
    assert backward.launches <= 600
    assert max(forward.numbers, backward.numbers) <= 2**28  # 1 GB


@pytest.mark.parametrize("masked", (False, True))
def test_memory_grows_linearly_with_sequence_length(masked: bool, set_block_size: Any) -> None:
    set_block_size((1, 4))
    heads, numbers = 8, []
    for length in (96, 192):
        query, key, value = torch.randn(3, 1, heads, length, 4)
        maps = torch.randn(1, 1, heads, heads)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if masked else None
        tensors = [query, key, value, maps, None, maps, None, mask]
        with LaunchRecorder() as peak:
            output = module.talking_forward(*tensors, SCALING, True)
            module.talking_backward(output, tensors, SCALING, True)
        assert peak.numbers <= heads * 4 * 4 * length  # at most four blocks of four queries each
        numbers.append(peak.numbers)
    assert numbers[1] == 2 * numbers[0]


@pytest.mark.parametrize("seed", first(range(6), 2))
def test_custom_operators_pass_opcheck(seed: int, set_block_size: Any) -> None:
    call = random_call(seed)
    set_block_size((2, 4))
    tensors = [None if x is None else x.requires_grad_() for x in call.tensors]
    torch.library.opcheck(talking_blocks, (*tensors, call.mask, SCALING, call.causal))
    saved = [None if x is None else x.detach() for x in [*tensors, call.mask]]
    torch.library.opcheck(module.talking_gradients, (call.direction, saved, SCALING, call.causal))


@pytest.mark.compile
@pytest.mark.parametrize("seed", first(range(4)))
def test_compiled_and_exported_calls_equal_eager(seed: int) -> None:
    call = random_call(seed)
    expected = call.run(talking_blocks)
    compiled = torch.compile(lambda *arguments: talking_blocks(*arguments), fullgraph=True)
    torch.testing.assert_close(call.run(compiled), expected)

    class Attention(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor | None) -> torch.Tensor:
            return talking_blocks(*tensors, SCALING, call.causal)

    arguments = (*call.tensors, call.mask)
    torch.testing.assert_close(torch.export.export(Attention(), arguments).module()(*arguments), expected[0])
