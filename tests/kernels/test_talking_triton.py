"""Kernels of `talking` in Triton's interpreter, compared with the plain computation in float64 and the oracle."""

import os
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` runs these tests with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is off: `make test-triton` runs these tests with it", allow_module_level=True)

import triton.language as tl

import oracle_layers
from crosshead.modeling.kernels import talking_triton, triton_backends
from crosshead.modeling.kernels.talking_triton import TalkingCall, Tile, attend_in_tiles, fits
from crosshead.modeling.mechanisms.talking_blocks import talking_blocks
from oracle_layers import OPTION_CASES, assert_sdpa_agrees
from talking_cases import Drawn, Ranges
from toys import mixed_model, tokens

pytestmark = pytest.mark.slow

RANGES = Ranges(
    batches=(1, 2), shared=(1, 1, 2, 3, 6), features=(2, 5, 20), lengths=(2, 3, 16, 17, 33, *range(4, 41, 3))
)
TALKING = {name: mixers for name, mixers in OPTION_CASES.items() if "talking" in mixers}


def call_arguments(call: TalkingCall) -> list[Any]:
    """The fields of a call, as arguments of `talking_blocks`."""
    return [getattr(call, part.name) for part in fields(call)]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[TalkingCall]:
    """Use the kernels as on a GPU, with float64 inputs in float32; the list receives all calls."""
    calls: list[TalkingCall] = []

    def in_float32(call: TalkingCall) -> torch.Tensor:
        calls.append(call)
        if call.query.dtype != torch.float64:
            return attend_in_tiles(call)
        names = ("query", "key", "value", "logits_map", "logits_key_map", "weights_map", "weights_key_map")
        parts = {name: getattr(call, name) for name in names}
        call = replace(call, **{name: None if x is None else x.float() for name, x in parts.items()})
        return attend_in_tiles(call).double()

    monkeypatch.setattr(talking_triton, "attend_in_tiles", in_float32)
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    monkeypatch.setattr(oracle_layers, "OUTPUT_TOLERANCE", 3e-5)
    monkeypatch.setattr(oracle_layers, "GRADIENT_TOLERANCE", 3e-4)
    # The interpreter computes with NumPy, which cannot multiply bfloat16.
    monkeypatch.setitem(talking_triton.OPERAND_DTYPES, torch.bfloat16, tl.float32)
    rows = [(heads, own, size) for heads in (16, 32) for own in (False, True) for size in (2, 4, 8)]
    monkeypatch.setattr(talking_triton, "TILES", dict.fromkeys(rows, Tile(16, 16, 16, 16, 1)))
    return calls


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_random_calls_equal_plain_computation(first: int, kernel_calls: list[TalkingCall]) -> None:
    """Outputs and gradients agree for 50 random calls."""
    for seed in range(first, first + 50):
        Drawn(seed, RANGES).agrees(torch.float32, 3e-5)
    assert len(kernel_calls) == 50


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_half_precision_is_as_accurate_as_plain_computation(
    seed: int, dtype: torch.dtype, kernel_calls: list[TalkingCall]
) -> None:
    Drawn(seed, RANGES).is_as_near(dtype)
    assert len(kernel_calls) == 1


@pytest.mark.parametrize("heads", (16, 17, 32))
def test_many_heads_equal_blockwise_attention(heads: int, kernel_calls: list[TalkingCall]) -> None:
    query, key, value = (torch.randn(1, heads, 20, 4) for _ in range(3))
    maps = torch.randn(2, 1, 1, heads, heads) / heads**0.5
    call = TalkingCall(query, key, value, maps[0], None, maps[1], None, None, 0.5, True)
    torch.testing.assert_close(attend_in_tiles(call), talking_blocks(*call_arguments(call)), rtol=1e-4, atol=1e-5)


def test_kernel_fits_at_most_32_heads() -> None:
    for heads, fit in ((32, True), (33, False)):
        query, maps = torch.zeros(1, heads, 4, 4).bfloat16(), torch.zeros(1, 1, heads, heads)
        assert fits(TalkingCall(query, query, query, maps, None, maps, None, None, 0.5, True)) is fit


def test_masked_keys_are_not_read() -> None:
    """Masked keys and values are NaN and would spoil every sum."""
    query, key, value = (torch.randn(1, 2, 64, 16) for _ in range(3))
    key[:, :, :32] = value[:, :, :32] = torch.nan
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril() & (torch.arange(64) >= 32)
    maps = torch.randn(2, 1, 1, 2, 2)
    of_maps = (maps[0], None, maps[1], None)
    result = attend_in_tiles(TalkingCall(query[:, :, 32:], key, value, *of_maps, mask[:, :, 32:], 0.5, True))
    alone = TalkingCall(*(x[:, :, 32:] for x in (query, key, value)), *of_maps, None, 0.5, True)
    torch.testing.assert_close(result, talking_blocks(*call_arguments(alone)))


@pytest.mark.parametrize("padding", ((0, 2), None))
@pytest.mark.parametrize("heads", ((4, 2), (4, 4)))
@pytest.mark.parametrize("case", TALKING)
def test_layer_follows_the_oracle(
    case: str, heads: tuple[int, int], padding: tuple[int, int] | None, kernel_calls: list[TalkingCall]
) -> None:
    """A layer agrees with the oracle, with a mask and without."""
    assert_sdpa_agrees(TALKING[case], heads, padding, "crosshead_talking_triton")
    assert len(kernel_calls) == 1


@pytest.mark.compile
def test_compiled_training_step_is_one_graph(kernel_calls: list[TalkingCall]) -> None:
    model = mixed_model("Llama", {"talking": {}}, "crosshead_talking_triton").train()
    ids, parameters = tokens(), [*model.parameters()]
    expected = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, parameters)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = torch.autograd.grad(compiled(ids, labels=ids, use_cache=False).loss, parameters)
    torch.compiler.reset()
    assert len(kernel_calls) == 4
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
