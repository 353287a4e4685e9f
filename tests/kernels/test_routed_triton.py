"""Kernels of `mixture` in Triton's interpreter, compared with plain attention in float64 and with the oracle."""

import os
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` runs these tests with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is off: `make test-triton` runs these tests with it", allow_module_level=True)

import triton.language as tl

import oracle_layers
from crosshead.modeling.kernels import routed_triton, triton_backends
from crosshead.modeling.kernels.routed_triton import Tile, attend_selected
from oracle_layers import assert_sdpa_agrees
from routed_cases import (
    INPUTS,
    MASKS,
    MIXTURES,
    SCALING,
    SKIPPING,
    WINDOW,
    allowed_keys,
    check,
    logits_and_gradients,
    logits_in_parts,
    lower,
    plain,
    routes,
    window,
)
from toys import mixed_model, tokens

pytestmark = pytest.mark.slow

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TILES = (Tile(16, 16, 1), Tile(4, 16, 1), Tile(16, 4, 1))


def random_heads(batch: int, heads: int, length: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random heads (batch, heads, length, size), laid out like a projection, per head, or with strided features."""
    dims = random.choice(((0, 2, 1, 3), (0, 1, 2, 3), (0, 1, 3, 2)))
    whole = torch.randn(*([batch, heads, length, size][i] for i in dims)).to(dtype)
    return whole.permute(*(dims.index(i) for i in range(4))).requires_grad_()


def check_random_shape(kind: str, dtype: torch.dtype) -> None:
    make, groups, size = MASKS[kind], random.randint(1, 2), random.randint(1, 3)
    queries = random.choice((1, 2, 16, 17, random.randint(1, 40)))
    sizes = (random.randint(1, 2), queries, queries + (0 if kind == "causal" else random.choice((0, 0, 5))))
    features, of_values = random.choice(((4, 4), (16, 16), (20, 6)))
    q = random_heads(sizes[0], groups * size, queries, features, dtype)
    k, v = (random_heads(sizes[0], groups, sizes[2], of_side, dtype) for of_side in (features, of_values))
    chosen, mask = routes(sizes, groups * size), None if make is None else make(sizes)
    result = attend_selected(q, k, v, chosen, mask, SCALING, kind != "all")
    check(result, [q, k, v], chosen, allowed_keys(kind, sizes, mask), TOLERANCES[dtype])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_triton, "tiles_of", lambda *_: (random.choice(TILES), random.choice(TILES)))
    monkeypatch.setattr(routed_triton, "MAX_TOKENS", 16)
    # The interpreter computes with NumPy, which cannot multiply bfloat16.
    monkeypatch.setitem(routed_triton.OPERAND_DTYPES, torch.bfloat16, tl.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", MASKS)
def test_random_shapes_equal_plain_attention(kind: str, dtype: torch.dtype) -> None:
    """24 random shapes for each of 7 masks and 3 dtypes."""
    for seed in range(24):
        torch.manual_seed(seed)
        random.seed(f"{kind}{dtype}{seed}")
        check_random_shape(kind, dtype)


@pytest.mark.parametrize("chosen", (False, True))
def test_selecting_no_head_or_all_heads_equals_plain_attention(chosen: bool) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    routed = torch.full((1, 40, 2), chosen)
    result = attend_selected(q, k, v, routed, None, SCALING, True)
    assert bool(result.any()) == chosen
    check(result, [q, k, v], routed, lower((1, 40, 40)), TOLERANCES[q.dtype])


def test_mask_of_one_sequence_applies_to_whole_batch() -> None:
    q, k, v = (torch.randn(3, 2, 20, 8, requires_grad=True) for _ in range(3))
    mask, chosen = window((1, 20, 20)), routes((3, 20, 20), 2)
    result = attend_selected(q, k, v, chosen, mask, SCALING, True)
    check(result, [q, k, v], chosen, mask.expand(3, -1, -1), TOLERANCES[q.dtype])


def test_masked_keys_are_not_read() -> None:
    """Masked keys and values are NaN and would spoil every sum."""
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    mask, chosen = lower((1, 64, 64)) & (torch.arange(64) >= 32), torch.ones(1, 64, 1, dtype=torch.bool)
    k[:, :, :32] = v[:, :, :32] = torch.nan
    expected = plain(q[:, :, 32:], k[:, :, 32:], v[:, :, 32:], chosen[:, 32:], lower((1, 32, 32)))
    result = attend_selected(q, k, v, chosen, mask, SCALING, True)
    torch.testing.assert_close(result[:, 32:], expected)
    assert not result[:, :32].any()


@pytest.fixture
def query_shapes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Use the kernels as on a GPU, in float32 for any dtype; the list receives the query shape of each call."""
    shapes: list[torch.Size] = []

    def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(q.shape)
        return attend_selected(q.float(), k.float(), v.float(), *rest).to(q.dtype)

    monkeypatch.setattr(routed_triton, "attend_selected", in_float32)
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    monkeypatch.setattr(oracle_layers, "OUTPUT_TOLERANCE", 3e-5)
    monkeypatch.setattr(oracle_layers, "GRADIENT_TOLERANCE", 3e-4)
    return shapes


@pytest.mark.parametrize("padding", ((0, 2), None))
@pytest.mark.parametrize("heads", ((4, 2), (4, 4)))
@pytest.mark.parametrize("case", MIXTURES)
def test_layer_follows_the_oracle(
    case: str, heads: tuple[int, int], padding: tuple[int, int] | None, query_shapes: list[torch.Size]
) -> None:
    """A layer agrees with the oracle, with a mask and without."""
    if "version 2" in case and heads[0] == heads[1]:
        pytest.skip("two query heads read each key/value head")
    assert_sdpa_agrees(MIXTURES[case], heads, padding, "crosshead_mixture_triton")
    assert len(query_shapes) == ("differential" not in case)


@pytest.mark.parametrize("kind", INPUTS)
def test_model_equals_sdpa(kind: str, query_shapes: list[torch.Size]) -> None:
    """A whole model with masks made by transformers; one layer has a sliding window."""
    model = mixed_model("Qwen3", SKIPPING, "crosshead_mixture_triton", **WINDOW)
    result = logits_and_gradients(model, kind)
    assert len(query_shapes) == 2
    model.set_attn_implementation("sdpa")
    for ours, dense in zip(result, logits_and_gradients(model, kind), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-3, atol=1e-5 * max(1.0, dense.abs().max().item()))
    assert len(query_shapes) == 2


def test_chunked_prefill_gives_the_same_logits(query_shapes: list[torch.Size]) -> None:
    model, ids = mixed_model("Llama", SKIPPING, "crosshead_mixture_triton"), tokens(2, 12)
    result = logits_in_parts(model, ids, (5, 6, 1))
    torch.testing.assert_close(result, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert [shape[2] for shape in query_shapes] == [5, 5, 6, 6, 12, 12]


@pytest.mark.usefixtures("query_shapes")
def test_output_has_autocast_dtype() -> None:
    q, k, v = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8).bfloat16()
    chosen = torch.ones(1, 20, 2, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        result = attend_selected(q, k, v, chosen, None, SCALING, True)
    assert result.dtype == torch.bfloat16
    assert (result - plain(q, k, v.float(), chosen, lower((1, 20, 20)))).abs().max() < 0.05


@pytest.mark.compile
def test_compiled_training_step_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    model = mixed_model("Llama", SKIPPING, "crosshead_mixture_triton").train()
    ids, parameters = tokens(), [*model.parameters()]
    expected = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, parameters)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = torch.autograd.grad(compiled(ids, labels=ids, use_cache=False).loss, parameters)
    torch.compiler.reset()
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
