"""Generation with every kind of cache, and the contents of the caches."""

import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from case_grids import for_compositions, for_each_case_and_backbone, for_each_mechanism_on_each_decoder
from tiers import first, grid
from toys import BACKBONES, CASES, mixed_model, mixers_of, tokens

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
NEW = 6


@torch.no_grad()
def greedy_without_cache(model: Any, ids: torch.Tensor, new: int = NEW) -> torch.Tensor:
    """Return the reference for greedy decoding: one full forward pass per token."""
    for _ in range(new):
        following = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], dim=1)
    return ids


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return ids with NEW greedily generated tokens."""
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)


@pytest.mark.oldest
@for_each_mechanism_on_each_decoder
def test_generation_with_every_cache_equals_full_forward(case: str, backbone: str) -> None:
    model = mixed_model(backbone, mixers_of(case, backbone))
    ids = tokens()
    expected = greedy_without_cache(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache, "disable_compile": True}
        assert torch.equal(generate(model, ids, **options), expected)
        assert torch.equal(generate(model, ids, prefill_chunk_size=4, **options), expected)


@pytest.mark.oldest
@pytest.mark.parametrize("backbone", first(["Qwen3", "Llama", "Qwen2", "Qwen3Moe"]))
@for_compositions
def test_beam_search_and_assisted_generation_equal_uncached(case: str, backbone: str) -> None:
    model = mixed_model(backbone, CASES[case])
    ids = tokens()
    cached = generate(model, ids, num_beams=3)
    assert torch.equal(cached, generate(model, ids, num_beams=3, use_cache=False))
    one = ids[:1]
    expected = greedy_without_cache(model, one)
    assistant = mixed_model(backbone, CASES[case], num_hidden_layers=2)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(1.01)
    assert torch.equal(generate(model, one, assistant_model=assistant), expected)
    assert torch.equal(generate(model, one, prompt_lookup_num_tokens=2), expected)


@pytest.mark.oldest
@pytest.mark.parametrize("backbone", first(["Qwen3", "Qwen2", "Qwen3Moe"]))
@for_compositions
def test_sliding_window_generation_equals_full_forward(case: str, backbone: str) -> None:
    """With windows shorter than the text, cached decoding equals the full forward, and the window has an effect."""
    model = mixed_model(backbone, CASES[case], **WINDOW)
    ids = tokens(2, 9)
    expected = greedy_without_cache(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static", disable_compile=True), expected)
    wide = mixed_model(backbone, CASES[case])
    with torch.no_grad():
        assert (wide(ids).logits - model(ids).logits)[:, -1].abs().max() > 1e-3


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache's keys and values."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def filled_cache(backbone: str, mixers: dict[str, Any], cache: Any = None) -> Any:
    """Return the cache after generation."""
    model = mixed_model(backbone, mixers, num_key_value_heads=4)
    out = model.generate(
        tokens(),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        past_key_values=cache,
    )
    return out.past_key_values


@pytest.mark.parametrize(("backbone", "norm"), grid(BACKBONES, (False, True), strength=1))
def test_half_the_components_halve_the_cache_size(backbone: str, norm: bool) -> None:
    full = filled_cache(backbone, {})
    half = filled_cache(backbone, {"explicit": {"key_heads": 2, "value_heads": 2, "norm": norm}})
    length = full.get_seq_length()
    assert half.get_seq_length() == length
    scale_bytes = 2 * 2 * length * 4 * 4 if backbone.startswith("Qwen3") else 0  # batch, layers, tokens, heads, bytes
    assert cache_bytes(half) == cache_bytes(full) // 2 + scale_bytes


def test_cache_size_follows_component_counts_of_each_layer() -> None:
    full = cache_bytes(filled_cache("Llama", {}))
    mixers = {"explicit": {"key_heads": [1, 3], "value_heads": [2, 2], "norm": False}}
    assert cache_bytes(filled_cache("Llama", mixers)) == full * (1 + 3 + 2 + 2) // 16
    one_layer = {"explicit": {"key_heads": 2, "value_heads": 2, "layers": [1], "norm": False}}
    assert cache_bytes(filled_cache("Llama", one_layer)) == full * 3 // 4


def test_static_cache_holds_components_only() -> None:
    model = mixed_model("Llama", {"explicit": {"key_heads": 2, "value_heads": 2}}, num_key_value_heads=4)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(tokens(), past_key_values=cache)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(2, 1, 32, 2 * 8)] * 2


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3"))
def test_explicit_groups_keep_cache_size_and_generated_tokens(backbone: str) -> None:
    counts = {"key_heads": 2, "value_heads": 4, "norm": False}
    caches = [filled_cache(backbone, {"explicit": {"groups": groups, **counts}}) for groups in (1, 2)]
    assert cache_bytes(caches[0]) == cache_bytes(caches[1])
    model, ids = mixed_model(backbone, {"explicit": {"groups": 2, **counts}}, "sdpa", num_key_value_heads=4), tokens()
    expected = greedy_without_cache(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static", disable_compile=True), expected)


@pytest.mark.parametrize("mixers", ({"explicit": {}}, {"explicit": {"on": ["key"]}}, {"explicit": {}, "talking": {}}))
@torch.no_grad()
def test_wide_cache_is_used_only_when_attention_reads_wide_heads(mixers: dict[str, Any]) -> None:
    """Heads are cached as one wide head if attention reads them so; a given past (e.g. a prefix) keeps its form."""
    model, ids = mixed_model("Llama", mixers, backend="sdpa"), tokens()
    expected, separate = model(ids, use_cache=False).logits[:, -3:], DynamicCache(config=model.config)
    attentions = [layer.self_attn for layer in model.model.layers]
    is_wide = list(mixers) == ["explicit"] and not mixers["explicit"]
    assert all(attention.wide_cache == is_wide for attention in attentions)
    for attention in attentions:
        attention.wide_cache = False
    model(ids[:, :-3], past_key_values=separate)
    for attention in attentions:
        attention.wide_cache = is_wide
    wide = DynamicCache(config=model.config)
    model(ids[:, :-3], past_key_values=wide)
    heads = model.config.num_key_value_heads
    for cache, forms in ((separate, {heads}), (wide, {1 if is_wide else heads})):
        following = [
            model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(len(ids[0]) - 3, len(ids[0]))
        ]
        assert (torch.cat(following, 1) - expected).abs().max() < 1e-5
        assert {layer.keys.shape[1] for layer in cache.layers} == forms


def test_mechanisms_other_than_explicit_keep_cache_size() -> None:
    full = cache_bytes(filled_cache("Qwen3", {}))
    for mixers in ({"knocking": {}}, {"mixture": {"active_heads": 3}}, {"talking": {}}, {"differential": {}}):
        assert cache_bytes(filled_cache("Qwen3", mixers)) == full


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_cropped_and_reordered_cache_equals_full_forward(case: str) -> None:
    model = mixed_model("Qwen3", CASES[case])
    ids = tokens(2, 9)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    continued = model(ids.flip(0)[:, 6:], past_key_values=cache).logits
    assert (continued - model(ids.flip(0)).logits[:, 6:]).abs().max() < 1e-4


@for_each_case_and_backbone
@torch.no_grad()
def test_cache_update_frees_old_keys_before_values(case: str, backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old keys are freed when the cache replaces them, so that the new values can reuse their memory."""
    model, freed = mixed_model(backbone, CASES[case]), []
    cache = model(tokens()).past_key_values

    def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        past = weakref.ref(layer.keys)
        layer.keys = torch.cat([layer.keys, keys], dim=-2)
        freed.append(past() is None)
        layer.values = torch.cat([layer.values, values], dim=-2)
        return layer.keys, layer.values

    monkeypatch.setattr(DynamicLayer, "update", update)
    model(tokens()[:, :1], past_key_values=cache)
    assert freed and all(freed)
