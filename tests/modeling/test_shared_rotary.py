"""DeepSeek-V2, DeepSeek-V3 and GTA: compared with oracles and stock models; cache contents and refusals."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import oracle_latent
from case_grids import for_each_case_and_shared_rotary
from oracle_arithmetic import LayerShape
from oracle_layers import OPTION_CASES, Layer, additive, assert_layer_agrees, oracle_view
from tiers import grid
from toys import LATENT, NEUTRAL, SHARED_ROTARY, mixed_config, mixed_model, mixers_of, model_class, stock_model, tokens

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2, queries of full rank": ("DeepseekV2", {}),
    "V2, queries of low rank": ("DeepseekV2", {"q_lora_rank": 10, "attention_bias": True}),
    "V3, queries of full rank": ("DeepseekV3", {"q_lora_rank": None}),
    "V3, halves": ("DeepseekV3", {"rope_interleave": False, "attention_bias": True}),
    "GTA": ("Gta", {"attention_bias": True}),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((backbone, {"explicit": {}}, "keys and values") for backbone in SHARED_ROTARY),
    *((backbone, {"knocking": {"on": ["value", "key"]}}, "use query or value") for backbone in SHARED_ROTARY),
    *((backbone, {"differential": {"half_values": True}}, "use False") for backbone in SHARED_ROTARY),
    *((backbone, {"differential": {"version": 2}}, "use 1") for backbone in LATENT),
    *((backbone, {"talking": {"dynamic": ["key_weights"]}}, "terms of queries") for backbone in LATENT),
]


def supported_option_cases() -> dict[str, dict[str, Any]]:
    """Return cases that use every option that these backbones support at least once."""
    on = ["query", "value"]
    cases = {f"knocking {form}": {"knocking": {"form": form, "on": on}} for form in ("mlp", "linear", "gate")}
    for name, mixers in OPTION_CASES.items():
        options = mixers.get("differential", {})
        key_terms = [term for term in mixers.get("talking", {}).get("dynamic", ()) if term.startswith("key")]
        if "explicit" not in mixers and "knocking" not in mixers and options.get("version") != 2 and not key_terms:
            cases[name] = mixers
    return cases | {"mixture before knocking": OPTION_CASES["mixture before knocking"]}


class SharedRotaryLayer(Layer):
    """One attention layer in float64 with inputs (2, 7, 24), and the oracle's arguments for it."""

    def __init__(self, backbone: str, mixers: dict[str, Any], **changes: Any) -> None:
        model = mixed_model(backbone, mixers, attention_dropout=0.0, **changes).double()
        self.attention = model.model.layers[1].self_attn
        self.config = model.config
        layout = self.config.layout_of_layer(1)
        self.mixers, _ = oracle_view(self.config, 1)
        heads = layout.query_heads, layout.key_value_heads
        self.shape = LayerShape(*heads, layout.head_dim, 1, self.config.rms_norm_eps, has_qk_norm=False)
        length, padding = 7, torch.tensor([0, 2])
        self.inputs = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.inputs = self.inputs * torch.linspace(0.5, 2.0, 24, dtype=torch.float64)
        real = torch.arange(length) >= padding[:, None]
        self.allowed = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None, :]
        self.rows = self.allowed.any(-1)
        rotated = 4  # rotary features in the toys of both MLA and GTA
        frequencies = 100.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        self.angles = torch.arange(length)[:, None] * frequencies
        neighbours = getattr(self.config, "rope_interleave", True)
        self.sizes = oracle_latent.LatentSizes(12, 8, 6, neighbours) if hasattr(self.config, "kv_lora_rank") else None

    def embeddings(self, part: slice) -> Any:
        """Return the position embeddings as the model passes them to the layer."""
        angles = self.angles[None, part].expand(2, -1, -1)
        if self.config.model_type.endswith("v2"):
            return torch.polar(torch.ones_like(angles), angles)
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()

    def ours(self, cache: Any = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        part = slice(start, stop)
        output, _ = self.attention(
            self.inputs[:, part],
            position_embeddings=self.embeddings(part),
            attention_mask=additive(self.allowed[:, part, :stop]),
            past_key_values=cache,
        )
        return output

    def truth(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights = dict(self.attention.named_parameters())
        outputs = []
        for inputs, allowed in zip(self.inputs, self.allowed, strict=True):
            common = (self.mixers, self.angles, allowed)
            if self.sizes is not None:
                result = oracle_latent.latent_sequence(inputs, weights, self.shape, self.sizes, *common)
            else:
                result = oracle_latent.tied_sequence(inputs, weights, self.shape, *common)
            outputs.append(result[0])
        return torch.stack(outputs), {}


@for_each_case_and_shared_rotary
def test_layer_follows_the_oracle(case: str, backbone: str) -> None:
    assert_layer_agrees(SharedRotaryLayer(backbone, mixers_of(case, backbone)))


@pytest.mark.parametrize(("variant", "case"), grid(VARIANTS, supported_option_cases(), strength=1))
def test_every_option_follows_the_oracle(variant: str, case: str) -> None:
    backbone, changes = VARIANTS[variant]
    assert_layer_agrees(SharedRotaryLayer(backbone, supported_option_cases()[case], **changes))


@for_each_case_and_shared_rotary
def test_layer_with_cache_follows_the_oracle(case: str, backbone: str) -> None:
    layer, cache = SharedRotaryLayer(backbone, mixers_of(case, backbone)), DynamicCache()
    parts = ((0, 4), (4, 6), (6, 7))
    assert_layer_agrees(layer, lambda: torch.cat([layer.ours(cache, *part) for part in parts], dim=1))


@for_each_case_and_shared_rotary
def test_sdpa_follows_the_oracle(case: str, backbone: str) -> None:
    layer = SharedRotaryLayer(backbone, mixers_of(case, backbone))
    layer.config._attn_implementation = "sdpa"
    mask = layer.allowed[:, None]
    embeddings = layer.embeddings(slice(None))
    assert_layer_agrees(layer, lambda: layer.attention(layer.inputs, embeddings, attention_mask=mask)[0])


def neutral_starts() -> list[Any]:
    """Return mechanisms that start as the stock model, without maps on keys, which are refused."""
    cases = []
    for name, starts in NEUTRAL.items():
        for start in starts if name != "explicit" else []:
            options = dict(start[name])
            if "key" in options.get("on", ()):
                options["on"] = ["query", "value"]
            cases.append({name: options})
    return cases


@pytest.mark.oldest
@pytest.mark.parametrize(("variant", "mixers"), grid(VARIANTS, neutral_starts(), strength=1), ids=str)
@torch.no_grad()
def test_neutral_start_is_the_stock_model(variant: str, mixers: dict[str, Any], tmp_path: Path) -> None:
    backbone, changes = VARIANTS[variant]
    rope = {} if backbone == "Gta" else {"rope_parameters": YARN}
    stock = stock_model(backbone, **changes, **rope)
    stock.save_pretrained(tmp_path)
    for backend in ("eager", "sdpa"):
        stock.set_attn_implementation(backend)
        ours = model_class(backbone).from_pretrained(tmp_path, mixers=mixers, attn_implementation=backend).eval()
        difference = (ours(tokens()).logits - stock(tokens()).logits).abs().max()
        # Blockwise talking sums in another order.
        assert difference <= (1e-5 if ("talking" in mixers, backend) == (True, "sdpa") else 0)


@pytest.mark.oldest
@pytest.mark.parametrize("backbone", LATENT)
@torch.no_grad()
def test_model_without_mixers_equals_stock_model(backbone: str, tmp_path: Path) -> None:
    stock = stock_model(backbone)
    stock.save_pretrained(tmp_path)
    ours, report = model_class(backbone).from_pretrained(tmp_path, mixers={}, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(ours.model.layers[0].self_attn) is type(stock.model.layers[0].self_attn)
    ours.set_attn_implementation("eager")
    assert torch.equal(ours.eval()(tokens()).logits, stock(tokens()).logits)


@pytest.mark.parametrize("backbone", SHARED_ROTARY)
@torch.no_grad()
def test_cache_sizes_match_papers(backbone: str) -> None:
    """MLA caches the latent vector and the rotary part, like the stock model; GTA tied states and the rotary half."""
    numbers = {"Gta": 2 * 8 + 4}.get(backbone, 12 + 4)
    model, ids = mixed_model(backbone, {"knocking": {}}), tokens(2, 9)
    static = StaticCache(config=model.config, max_cache_len=16)
    for cache, length in ((DynamicCache(config=model.config), 9), (static, 16)):
        model(ids, past_key_values=cache)
        for layer in cache.layers:
            assert layer.keys.numel() + layer.values.numel() == 2 * length * numbers
    if backbone in LATENT:
        stock = stock_model(backbone)(ids, use_cache=True).past_key_values
        assert stock.layers[0].keys.numel() + stock.layers[0].values.numel() == 2 * 9 * numbers


@pytest.mark.oldest
@pytest.mark.parametrize("backbone", SHARED_ROTARY)
@torch.no_grad()
def test_beam_search_and_prompt_lookup_equal_uncached(backbone: str) -> None:
    model, ids = mixed_model(backbone, mixers_of("knocking+mixture", backbone)), tokens()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    beams = [model.generate(ids, num_beams=3, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)
    one = ids[:1]
    expected = model.generate(one, use_cache=False, **options)
    assert torch.equal(model.generate(one, prompt_lookup_num_tokens=2, **options), expected)


@pytest.mark.parametrize(("backbone", "mixers", "allowed"), REFUSED)
def test_unsupported_mixers_are_refused(backbone: str, mixers: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed) as caught:
        mixed_config(backbone, mixers)
    assert "\n" not in str(caught.value)
    assert f"mixers.{next(iter(mixers))}" in str(caught.value)


def test_gta_with_differential_version_2_follows_the_oracle() -> None:
    assert_layer_agrees(SharedRotaryLayer("Gta", {"differential": {"version": 2}, "knocking": {}}))


@pytest.mark.parametrize(
    ("backbone", "changes", "message"),
    [
        ("DeepseekV2", {"num_key_value_heads": 2}, "num_key_value_heads=2 .*num_attention_heads=4"),
        ("DeepseekV3", {"num_key_value_heads": 2}, "num_key_value_heads=2 .*num_attention_heads=4"),
        ("Gta", {"head_dim": 6}, "head_dim=6 .*multiple of 4"),
    ],
)
def test_invalid_head_counts_and_sizes_are_refused(backbone: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixed_config(backbone, {"knocking": {}}, **changes)


@pytest.mark.parametrize("backbone", LATENT)
@torch.no_grad()
def test_data_parallel_replica_uses_its_own_projections(backbone: str) -> None:
    """DataParallel makes one replica per GPU, with its modules on that GPU."""
    layer = SharedRotaryLayer(backbone, {"gating": {}}, q_lora_rank=10)
    expected = layer.ours()
    layer.attention = layer.attention._replicate_for_data_parallel()
    layer.attention.q_b_proj = deepcopy(layer.attention.q_b_proj)
    layer.attention.q_b_proj.weight.zero_()
    assert (layer.ours() - expected).abs().max() > 0.01


def test_attention_scaling_includes_yarn_factor() -> None:
    attention = mixed_model("DeepseekV3", {"gating": {}}, rope_parameters=YARN).model.layers[0].self_attn
    assert attention.scaling == pytest.approx(12**-0.5 * (0.1 * 0.7 * math.log(4.0) + 1) ** 2)
