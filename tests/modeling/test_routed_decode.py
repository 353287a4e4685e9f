"""Decoding under `mixture`: heads that nobody needs are not read, and nothing else changes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import StaticCache

from crosshead.modeling import mixture, routed_attention, routed_decode
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.routed_decode import attend_to_needed, needed_part, reads_less
from routed_cases import MASKS, SKIPPING, WINDOW, call_of, check, logits_in_parts, routes, seen_under
from tiers import first, grid
from toys import mixed_model, tokens

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_decode, "LEAST_KEYS", 5)


def check_a_random_shape(kind: str, dtype: torch.dtype) -> int:
    make, groups, size = MASKS[kind], random.randint(1, 4), random.randint(1, 3)
    sizes = (random.randint(1, 3), 1, random.choice((6, 7, 13, 24, random.randint(6, 60))))
    q = torch.randn(sizes[0], groups * size, 1, 4).to(dtype).requires_grad_()
    k = torch.randn(sizes[0], groups, sizes[2], 4).to(dtype).requires_grad_()
    v = torch.randn(sizes[0], groups, sizes[2], random.choice((4, 6))).to(dtype).requires_grad_()
    chosen, mask = routes(sizes, groups * size), None if make is None else make(sizes)
    if mask is not None:
        mask = mask | ~mask.any(-1, keepdim=True)  # what sees nothing is the backend's to decide
    found = attend_to_needed(q, k, v, chosen, call_of(mask))
    if found is None:
        return 0
    if not chosen.any():
        assert not found.any()
        return 1
    check(found * chosen[..., None], [q, k, v], chosen, seen_under(kind, sizes, mask), TOLERANCES[dtype])
    return 1


@pytest.mark.parametrize(("kind", "dtype"), grid([kind for kind in MASKS if kind != "all"], TOLERANCES, strength=1))
@pytest.mark.parametrize("shapes", first([20, 80]))
def test_random_shapes(shapes: int, kind: str, dtype: torch.dtype) -> None:
    """Of 80 shapes for each of 6 masks and 3 formats about half leave heads unread: 500 at least in the slow tier."""
    torch.manual_seed(0)
    random.seed(f"{kind}{dtype}")
    assert sum(check_a_random_shape(kind, dtype) for _ in range(shapes)) >= 0.35 * shapes


@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "all"])
@pytest.mark.parametrize("shapes", first([20, 90]))
def test_random_shapes_without_gradients(shapes: int, kind: str) -> None:
    """As in decoding, where other products may be made: the same as with gradients."""
    torch.manual_seed(1)
    random.seed(kind)
    for _ in range(shapes):
        groups, size, sizes = (
            random.randint(1, 4),
            random.randint(1, 3),
            (random.randint(1, 3), 1, random.randint(6, 60)),
        )
        q, (k, v) = torch.randn(sizes[0], groups * size, 1, 8), torch.randn(2, sizes[0], groups, sizes[2], 8)
        make, chosen = MASKS[kind], routes(sizes, groups * size)
        mask = None if make is None else make(sizes)
        mask = mask if mask is None else mask | ~mask.any(-1, keepdim=True)
        with torch.no_grad():
            found = attend_to_needed(q, k, v, chosen, call_of(mask))
        expected = attend_to_needed(q.requires_grad_(), k, v, chosen, call_of(mask))
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", range(4))
def test_what_is_not_needed_is_not_read(head: int) -> None:
    """There it may hold anything; here it would spoil every sum."""
    q, (k, v) = torch.randn(2, 8, 1, 4), (torch.full((2, 4, 20, 4), torch.nan) for _ in range(2))
    k[:, head], v[:, head] = torch.randn(2, 2, 20, 4)
    chosen = torch.zeros(2, 1, 8, dtype=torch.bool)
    chosen[0, 0, 2 * head] = True
    found = attend_to_needed(q, k, v, chosen, call_of(None))
    assert found is not None and not found.isnan().any()
    assert found[0, 0, 2 * head].any() and not found[1].any()


def test_where_it_pays() -> None:
    q, k, call = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 20, 8), call_of(None)
    assert reads_less(q, k, 0.5, call)
    assert reads_less(q, k, 0.9, call)  # on a CPU it turns out what is needed
    assert not reads_less(q.expand(-1, -1, 2, -1), k, 0.5, call)
    assert not reads_less(q, k[:, :, :1], 0.5, call)
    assert not reads_less(q.to("meta"), k, 0.5, call)
    with torch.autocast("cpu", torch.bfloat16):
        assert not reads_less(q, k, 0.5, call)
    by_head = torch.ones(1, 4, 1, 20, dtype=torch.bool)
    assert reads_less(q, k, 0.5, replace(call, mask=by_head[:, :1]))
    for facts in ({"plain": False}, {"dropout": 0.1}, {"mask": torch.zeros(1, 1, 1, 20)}, {"mask": by_head}):
        assert not reads_less(q, k, 0.5, replace(call, **facts))
    assert attend_to_needed(q, k, k, torch.ones(1, 1, 4, dtype=torch.bool), call) is None


@pytest.mark.parametrize(
    ("heads", "groups", "shared", "selected", "part"),
    [(16, 16, 4, 4, 0.5), (16, 16, 0, 8, 0.5), (8, 4, 3, 1, 0.68), (32, 8, 16, 8, 1 - 0.5 * 0.5**4)],
)
def test_how_many_heads_are_needed(heads: int, groups: int, shared: int, selected: int, part: float) -> None:
    assert needed_part(HeadLayout(64, heads, groups, 8), shared, selected) == pytest.approx(part)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of keys of each call that left heads unread."""
    seen: list[int] = []

    def noted(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        found = attend_to_needed(query, key, *rest)
        seen.extend([] if found is None else [key.shape[2]])
        return found

    monkeypatch.setattr(mixture, "attend_to_needed", noted)
    return seen


@pytest.mark.parametrize("changes", ({}, WINDOW), ids=("full", "window"))
def test_model(changes: dict[str, Any], asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token after a prompt, and as a whole."""
    model = mixed_model("Qwen3", SKIPPING, "sdpa", num_key_value_heads=4, **changes)
    ids = tokens(2, 16)
    found = logits_in_parts(model, ids, (10, 1, 1, 1, 1, 1, 1))
    assert len(asked) == (6 if changes else 12)  # a window of four keys is read whole
    torch.testing.assert_close(found, model(ids).logits.detach(), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(routed_decode, "LEAST_KEYS", 1000)
    torch.testing.assert_close(found, logits_in_parts(model, ids, (10, 1, 1, 1, 1, 1, 1)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_generation_with_padding_and_a_static_cache(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixed_model("Llama", SKIPPING, "sdpa", num_key_value_heads=4)
    ids, seen = tokens(2, 8), torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
    options = {"attention_mask": seen, "max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "disable_compile": True}

    def generated(**more: Any) -> torch.Tensor:
        return torch.stack(model.generate(ids, **options, **more).logits)

    found = generated(), generated(past_key_values=StaticCache(model.config, 20))
    assert len(asked) == 20
    monkeypatch.setattr(routed_decode, "LEAST_KEYS", 1000)
    monkeypatch.setattr(routed_attention, "LEAST_QUERIES", 1000)
    expected = generated()
    for ours in found:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
