"""Kernels of `mixture` for one query token, in Triton's interpreter, compared with plain attention in float64."""

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` runs these tests with it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is off: `make test-triton` runs these tests with it", allow_module_level=True)

import triton.language as tl

from crosshead.modeling.kernels import routed_decode_triton, triton_backends
from crosshead.modeling.kernels.routed_decode_triton import decode_selected
from crosshead.modeling.kernels.triton_backends import mixture_eligible
from routed_cases import MASKS, SCALING, SKIPPING, WINDOW, allowed_keys, logits_in_parts, plain, routes
from toys import mixed_model, tokens

pytestmark = pytest.mark.slow

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KINDS = [kind for kind in MASKS if kind != "all"]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_decode_triton, "KEYS_PER_PART", 32)
    monkeypatch.setattr(routed_decode_triton, "PARTS_PER_STEP", 2)
    monkeypatch.setattr(routed_decode_triton, "keys_per_tile", lambda *_: 16)
    # The interpreter computes with NumPy, which cannot multiply bfloat16.
    monkeypatch.setitem(routed_decode_triton.OPERAND_DTYPES, torch.bfloat16, tl.float32)


def random_heads(batch: int, heads: int, length: int, size: int) -> torch.Tensor:
    """Random heads (batch, heads, length, size), contiguous per head or per token, or with strided features."""
    dims = random.choice(((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)))
    whole = torch.randn(*([batch, heads, length, size][i] for i in dims))
    return whole.permute(*(dims.index(i) for i in range(4)))


def check_random_shape(kind: str, dtype: torch.dtype) -> None:
    make, groups, size = MASKS[kind], random.randint(1, 4), random.choice((1, 2, 3, 17))
    sizes = (random.randint(1, 3), 1, random.choice((1, 15, 16, 32, 33, random.randint(1, 120))))
    features, of_values = random.choice(((4, 4), (16, 16), (20, 6)))
    q = random_heads(sizes[0], groups * size, 1, features).to(dtype)
    k, v = (random_heads(sizes[0], groups, sizes[2], of_side).to(dtype) for of_side in (features, of_values))
    chosen, mask = routes(sizes, groups * size), None if make is None else make(sizes)
    result = decode_selected(q, k, v, chosen, mask, SCALING)
    assert result.dtype == dtype
    expected = plain(q.double(), k.double(), v.double(), chosen, allowed_keys(kind, sizes, mask))
    result = result * chosen[..., None]
    assert (result - expected).abs().max() <= TOLERANCES[dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_shapes_equal_plain_attention(kind: str, dtype: torch.dtype) -> None:
    """28 random shapes for each of 6 masks and 3 dtypes."""
    for seed in range(28):
        torch.manual_seed(seed)
        random.seed(f"{kind}{dtype}{seed}")
        check_random_shape(kind, dtype)


@pytest.mark.parametrize("head", range(4))
def test_masked_and_unselected_keys_are_not_read(head: int) -> None:
    """Keys and values of other heads and masked keys are NaN and would spoil every sum."""
    q, (k, v) = torch.randn(2, 8, 1, 4), (torch.full((2, 4, 70, 4), torch.nan) for _ in range(2))
    k[0, head, :50], v[0, head, :50] = torch.randn(2, 50, 4)
    chosen, mask = torch.zeros(2, 1, 8, dtype=torch.bool), (torch.arange(70) < 50)[None, None]
    chosen[0, 0, 2 * head] = True
    result = decode_selected(q, k, v, chosen, mask, SCALING)
    expected = plain(q[:1], k[:1, :, :50], v[:1, :, :50], chosen[:1], torch.ones(1, 1, 50, dtype=torch.bool))
    torch.testing.assert_close(result[0, 0, 2 * head], expected[0, 0, 2 * head])
    assert not result[1].any() and not result.isnan().any()


@pytest.fixture
def kernel_key_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the kernel as on a GPU, for any number of keys; the list receives the number of keys of each call."""
    key_counts: list[int] = []

    def recorded(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        key_counts.append(key.shape[2])
        return decode_selected(query, key, *rest)

    monkeypatch.setattr(routed_decode_triton, "decode_selected", recorded)
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    return key_counts


@torch.no_grad()
def test_mixture_eligible_only_for_supported_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    query, mask = torch.zeros(1, 4, 1, 8).bfloat16(), torch.ones(1, 1, 1, 50, dtype=torch.bool)
    assert not mixture_eligible(query, mask, 0.0)  # on a CPU
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    assert mixture_eligible(query, mask, 0.0) and mixture_eligible(query, None, 0.0)
    assert not mixture_eligible(torch.cat([query] * 40, dim=-1), mask, 0.0)
    assert not mixture_eligible(query, mask, 0.1)
    assert not mixture_eligible(query, mask.float(), 0.0)
    assert not mixture_eligible(query, mask.expand(-1, 4, -1, -1), 0.0)
    with torch.enable_grad():
        assert not mixture_eligible(query, mask, 0.0)


@pytest.mark.parametrize("changes", ({}, WINDOW), ids=("full", "window"))
def test_token_by_token_decoding_equals_full_forward(changes: dict[str, Any], kernel_key_counts: list[int]) -> None:
    """Decoding token by token after a prompt gives the same logits as one pass over the whole sequence."""
    model = mixed_model("Qwen3", SKIPPING, "crosshead_mixture_triton", num_key_value_heads=4, **changes)
    ids = tokens(2, 16)
    result = logits_in_parts(model, ids, (10, 1, 1, 1, 1, 1, 1))
    assert len(kernel_key_counts) == 12
    torch.testing.assert_close(result, model(ids).logits.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.compile
@torch.no_grad()
def test_compiled_decoding_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backends, "runs_triton", lambda x: True)
    q, k, v, gates = torch.randn(1, 4, 1, 8), *torch.randn(2, 1, 4, 5000, 8), (torch.rand(1, 1, 4) < 0.5).float()
    layer = SimpleNamespace(is_causal=True)

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        return triton_backends.mixture_triton_attention(layer, *heads, None, SCALING, gates=gates)[0]

    result = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.compiler.reset()
    torch.testing.assert_close(result, attend(q, k, v))
