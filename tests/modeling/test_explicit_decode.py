"""Attention over component heads without combining them: agrees with the oracle, and makes no large copies."""

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosshead.modeling.mechanisms.explicit import explicit_attention_forward
from explicit_cases import Case, make
from oracle_layers import Layer, assert_layer_agrees
from tiers import first, grid
from toys import CASES, mixed_model, tokens


def assert_agrees(case: Case) -> None:
    """Assert that outputs, and gradients of a weighted sum, equal the oracle's for queries with visible keys."""
    for leaf in case.leaves:
        leaf.requires_grad_(True)
    ours, truth = case.ours(), case.truth()
    visible = case.allowed.any(-1)
    assert ours.isfinite().all()
    assert torch.allclose(ours[visible], truth[visible], rtol=1e-10, atol=1e-10)
    direction = (
        torch.linspace(0.5, 1.5, truth.numel(), dtype=torch.float64).reshape(truth.shape) * visible[..., None, None]
    )
    gradients = torch.autograd.grad((ours * direction).sum(), case.leaves)
    expected = torch.autograd.grad((truth * direction).sum(), case.leaves)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert mine.isfinite().all()
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seeds", first([range(10), range(10, 600)]))
def test_random_shapes_follow_the_oracle(seeds: range) -> None:
    for seed in seeds:
        assert_agrees(make(seed))


@pytest.mark.parametrize("cases", first([60, 600]))
@torch.no_grad()
def test_float32_without_gradients_equals_float64_reference(cases: int) -> None:
    """Without gradients, as in decoding: the plain function and the registered one (a CPU kernel) are checked."""
    for seed in range(cases):
        case = make(seed)
        visible, exact = case.allowed.any(-1), case.plain(torch.float64)
        for attend in (explicit_attention_forward, ALL_ATTENTION_FUNCTIONS["crosshead_explicit"]):
            output = case.ours(torch.float32, attend)
            assert output.isfinite().all()
            torch.testing.assert_close(output[visible].double(), exact[visible], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cases", first([100, 500]))
@torch.no_grad()
def test_bfloat16_is_as_accurate_as_eager_attention(cases: int) -> None:
    """Compares mean errors over many shapes, since the error of a single case varies too much."""
    ours, eager = [], []
    for seed in range(cases):
        case = make(seed)
        visible, exact = case.allowed.any(-1), case.plain(torch.float64)
        for measured, output in ((ours, case.ours(torch.bfloat16)), (eager, case.plain(torch.bfloat16))):
            assert output.isfinite().all()
            measured.append((output - exact)[visible].abs().mean() / exact[visible].abs().mean())
    errors = [torch.stack(measured).nan_to_num().mean() for measured in (ours, eager)]
    assert errors[0] < 1.5 * errors[1]


@torch.no_grad()
def test_padded_keys_are_ignored() -> None:
    """Padding is hidden by boolean and by additive masks."""
    keys = torch.randn(2, 2, 50, 4)
    allowed = (torch.arange(50) > 40).expand(2, 1, 1, -1)
    query, scalars = torch.randn(2, 3, 1, 4), torch.randn(3, 2)
    maps: dict[str, Any] = {"key_map": scalars, "value_map": scalars, "implementation": "sdpa"}
    for mask in (allowed, torch.zeros(2, 1, 1, 50).masked_fill(~allowed, -math.inf)):
        output = explicit_attention_forward(None, query, keys, keys, mask, 1.0, **maps)[0]
        short = keys[:, :, 41:]
        assert torch.allclose(
            output, explicit_attention_forward(None, query, short, short, None, 1.0, **maps)[0], atol=1e-5
        )


class AllocationRecorder(TorchDispatchMode):
    """Records the size of the largest new tensor (views excluded), and the batched matmuls."""

    numbers = 0

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in storages:
            self.numbers = max(self.numbers, result.numel())
        self.products += [str(func)] * ("bmm" in str(func))
        return result


@pytest.mark.parametrize("normed", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@torch.no_grad()
def test_gpu_decoding_does_not_copy_the_cache(dtype: torch.dtype, normed: bool) -> None:
    """If the wide head is too large for flash attention, two matmuls accumulate in float32, without a copy."""
    with FakeTensorMode():
        sizes = (2, 32, 1, 128), (2, 500, 4, 128), (8, 4), (2, 8, 500)
        query, states, scalars, scale = (torch.empty(size, dtype=dtype, device="cuda") for size in sizes)
        maps: dict[str, Any] = {"key_map": scalars, "value_map": scalars, "key_scale": scale if normed else None}
        cache = states.transpose(1, 2)
        with AllocationRecorder() as largest:
            output, _ = explicit_attention_forward(None, query, cache, cache, None, 0.1, implementation="sdpa", **maps)
    assert output.shape == (2, 1, 32, 128) and output.dtype == dtype
    assert largest.products == 2 * ["aten.bmm.dtype"]
    assert largest.numbers < states.numel()


def test_sdpa_output_in_token_layout_follows_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some GPU kernels return outputs with the memory layout (B, T, H, d)."""
    attend = functional.scaled_dot_product_attention

    def by_token(*arguments: Any, **options: Any) -> torch.Tensor:
        return attend(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", by_token)
    for seed in range(10):
        assert_agrees(make(seed))


@torch.no_grad()
def test_adjacent_cached_components_are_not_copied() -> None:
    """Covers contiguous and strided components, in one group or two."""
    for numbers, groups in ((0, 1), (3, 1), (0, 2), (3, 2)):
        heads = torch.randn(2, 400, 4 * 64 + numbers)[..., : 4 * 64].unflatten(-1, (4, 64)).transpose(1, 2)
        maps: dict[str, Any] = {side: torch.randn(6, 4 // groups) for side in ("key_map", "value_map")}
        with AllocationRecorder() as largest:
            explicit_attention_forward(
                None, torch.randn(2, 6, 1, 64), heads, heads, None, 1.0, implementation="sdpa", **maps
            )
        assert largest.numbers < heads[0, 0].numel()


@pytest.mark.parametrize(
    ("on", "backbone", "groups"),
    grid((["key", "value"], ["key"], ["value"]), ("Llama", "Qwen3"), (1, 2), strength=2),
)
def test_layer_with_cache_follows_the_oracle(on: list[str], backbone: str, groups: int) -> None:
    counts = {f"{side}_heads": groups * (1 + (side == "value")) for side in on}
    sizes = {"num_attention_heads": 4 * groups, "num_key_value_heads": 2 * groups}
    layer = Layer(backbone, {"explicit": {"on": on, "groups": groups, **counts}}, **sizes)
    layer.attention.config._attn_implementation = "sdpa"
    cache = DynamicCache()
    parts = ((0, 4), (4, 6), (6, 7))
    assert_layer_agrees(layer, lambda: torch.cat([layer.ours(cache, *part) for part in parts], dim=1))


@pytest.fixture
def uncombined_query_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of queries of each call that attends to components without combining them."""
    query_counts: list[int] = []

    def spy(module: Any, query: torch.Tensor, *others: Any, **options: Any) -> Any:
        query_counts.append(query.shape[2])
        return explicit_attention_forward(module, query, *others, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "crosshead_explicit", spy)
    return query_counts


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3"))
@pytest.mark.parametrize("mixers", (CASES["explicit"], {"explicit": {"groups": 2}}), ids=("components", "groups"))
@torch.no_grad()
def test_decoding_attends_without_combining_components(
    mixers: dict[str, Any], backbone: str, uncombined_query_counts: list[int]
) -> None:
    """Decoding one or a few tokens does not combine components; a prompt does."""
    model = mixed_model(backbone, mixers, backend="sdpa")
    ids, padding = tokens(2, 12), torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
    expected = mixed_model(backbone, mixers)(ids, attention_mask=padding).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        uncombined_query_counts.clear()
        start = model(ids[:, :9], attention_mask=padding[:, :9], past_key_values=cache).logits
        assert not uncombined_query_counts
        one = model(ids[:, 9:10], attention_mask=padding[:, :10], past_key_values=cache).logits
        two = model(ids[:, 10:], attention_mask=padding, past_key_values=cache).logits
        assert uncombined_query_counts == [1, 1, 2, 2]
        logits = torch.cat([start, one, two], dim=1)
        assert (logits - expected)[padding.bool()].abs().max() < 1e-4


def assert_one_graph(name: str, batch: int) -> None:
    """Assert that decoding with a static cache compiles without a graph break and gives the same logits."""
    model = mixed_model("Llama", CASES[name], backend="sdpa")
    ids = tokens(batch, 5)
    logits = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :4], past_key_values=cache)
        logits.append(call(ids[:, 4:], past_key_values=cache).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@pytest.mark.compile
@torch.no_grad()
def test_decoding_compiles_as_one_graph(uncombined_query_counts: list[int]) -> None:
    assert_one_graph("explicit", 2)
    assert uncombined_query_counts


@pytest.mark.compile
@pytest.mark.parametrize("name", ("explicit", "mixture"))
@torch.no_grad()
def test_decoding_with_registered_attention_compiles_as_one_graph(name: str) -> None:
    assert_one_graph(name, 1)


@pytest.mark.parametrize(("backend", "shortest"), (("sdpa", 3), ("eager", 2)))
@torch.no_grad()
def test_exported_model_accepts_other_lengths(backend: str, shortest: int) -> None:
    model, lengths = mixed_model("Qwen3", CASES["explicit"], backend), torch.export.Dim("T", min=shortest, max=64)
    shapes = {"input_ids": {1: lengths}, "use_cache": None}
    exported = torch.export.export(
        model, (), {"input_ids": tokens(), "use_cache": False}, dynamic_shapes=shapes, strict=False
    )
    for length in (shortest, 20):
        ids = tokens(2, length)
        logits = exported.module()(input_ids=ids, use_cache=False).logits
        assert (logits - model(ids).logits).abs().max() < 1e-5
