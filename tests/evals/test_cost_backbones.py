"""Costs of T5, TransNeXt, latent attention and GTA, against models that are run and against formulas."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

import cost_formulas
import crosshead
import toys
import transnext_toys
from crosshead import CrossheadT5Config, CrossheadT5EncoderModel, CrossheadTransNextConfig
from crosshead.evals.cost.counting import FLOPS
from crosshead.evals.cost.model import model_cost, usual_length
from crosshead.evals.cost.report import cost_report
from tiers import first, grid
from transnext_names import PUBLISHED_MIXTURES, PUBLISHED_SIZES, STAGES, mixture_of

LENGTH = 5
IDS = toys.tokens(batch=1, length=LENGTH)
# At least two component heads: with one there is no matmul for PyTorch's FLOP counter to see.
T5_CASES = {
    "parts": {"encoder": {"talking": {}}, "decoder": {"knocking": {}}, "cross": {"explicit": {"value_heads": 2}}},
    "plain": {},
    **toys.ENCODER_CASES,
    "explicit": {"explicit": {"key_heads": 2, "value_heads": 2}},
}


def counted_flops(run):
    """Return the FLOPs of a call by PyTorch's counter."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", first(T5_CASES, 3))
def test_t5_cost_matches_built_model(case):
    model = toys.mixed_model("T5", T5_CASES[case])
    cost = model_cost(model.config, LENGTH)
    named = dict(model.named_parameters())
    assert cost.parameters == sum(each.numel() for each in named.values())
    assert cost.new_parameters == sum(each.numel() for name, each in named.items() if ".mixers." in name)
    attention = [each.numel() for name, each in named.items() if "Attention." in name]
    assert cost.attention_parameters == sum(attention)
    training = counted_flops(lambda: model(IDS, labels=IDS, use_cache=False).loss.backward())
    assert training // FLOPS // LENGTH == cost.training_multiplications
    with torch.no_grad():
        start = IDS.new_zeros(1, 1)
        assert counted_flops(lambda: model(IDS, decoder_input_ids=start)) == cost.input_flops
        encoded = model.get_encoder()(IDS)
        cache = None
        for _ in range(LENGTH - 1):  # one by one, as generation does
            cache = model(encoder_outputs=encoded, decoder_input_ids=start, past_key_values=cache).past_key_values
        last = {"encoder_outputs": encoded, "decoder_input_ids": start, "past_key_values": cache}
        assert counted_flops(lambda: model(**last)) == cost.decode_flops
    held = [
        sum(tensor.numel() * 4 for layer in part.layers for tensor in (layer.keys, layer.values)) // LENGTH
        for part in (cache.self_attention_cache, cache.cross_attention_cache)
    ]
    assert [cost.kv_bytes_per_token, cost.cross_kv_bytes_per_token] == held
    assert cost.kv_bytes == sum(held) * LENGTH


def test_t5_small_cost_matches_formula():
    """T5-small with talking maps in the encoder and half as many component heads in cross-attention."""
    width, heads, size, inner, layers, vocabulary, length = 512, 8, 64, 2048, 6, 32128, 40
    mixers = {"encoder": {"talking": {}}, "cross": {"explicit": {"key_heads": 4, "value_heads": 4, "norm": False}}}
    report = cost_report(CrossheadT5Config(mixers=mixers), length)
    cost, stock = report["cost"], report["stock"]
    projection, products = width * heads * size, 2 * length * heads * size
    layer = 4 * projection + products + 2 * width * inner
    decoder = layer + 4 * projection + products
    whole = layers * (layer + decoder) + width * vocabulary
    assert stock["training_multiplications"] == 3 * whole
    assert stock["decode_multiplications"] == layers * (decoder - 2 * projection) + width * vocabulary
    first_token = layers * (4 * projection + 2 * heads * size + 2 * width * inner + 2 * projection + products)
    prefill = length * layers * (layer + 2 * projection) + first_token + width * vocabulary
    assert stock["input_flops"] == 2 * prefill and stock["prefill_flops"] == 2 * (prefill // length)
    combining = 2 * layers * (4 * heads * size)  # keys and values, for one token of the source
    added = layers * 2 * length * heads**2 + combining - layers * 2 * width * 4 * size
    assert cost["training_multiplications"] == 3 * (whole + added)
    assert cost["decode_multiplications"] == stock["decode_multiplications"] + combining * length
    assert cost["new_parameters"] == layers * 2 * heads**2 + layers * 2 * heads * 4
    per_token = layers * 2 * heads * size * 4
    assert (stock["kv_bytes_per_token"], stock["cross_kv_bytes_per_token"]) == (per_token, per_token)
    assert (cost["kv_bytes_per_token"], cost["cross_kv_bytes_per_token"]) == (per_token, per_token // 2)


def test_t5_cost_of_one_token_and_of_encoder_only_model():
    config = toys.mixed_config("T5", {"gating": {}})
    one = model_cost(config, 1)
    assert one.kv_bytes == one.kv_bytes_per_token + one.cross_kv_bytes_per_token > 0
    config.architectures = [CrossheadT5EncoderModel.__name__]
    alone = model_cost(config, LENGTH)
    model = CrossheadT5EncoderModel(config)
    assert alone.parameters == model.num_parameters() and alone.kv_bytes == alone.decode_flops == 0
    assert counted_flops(lambda: model(IDS)) == alone.input_flops


@pytest.mark.parametrize("half", [False, True])
def test_stock_t5_head_count_for_differential(half):
    config = toys.mixed_config("T5", {"differential": {"half_values": half}})
    stock = toys.stock_config("T5", num_heads=2 if half else 4)
    expected = model_cost(CrossheadT5Config(**stock.to_dict(), mixers={}), LENGTH)
    assert cost_report(config, LENGTH)["stock"]["input_flops"] == expected.input_flops


@pytest.mark.parametrize("size", first(PUBLISHED_SIZES))
def test_transnext_cost_matches_formula_and_paper(size):
    fields = PUBLISHED_SIZES[size] | STAGES
    config = CrossheadTransNextConfig(**fields, num_labels=1000, mixers={})
    assert usual_length(config, 1) == 56 * 56
    cost = model_cost(config, 56 * 56)
    assert cost.input_flops == 2 * cost_formulas.transnext(fields, 224, 1000)
    assert cost.prefill_multiplications == cost.input_flops // 2 // 56**2
    assert cost.kv_bytes == cost.decode_flops == cost.copied_parameters == 0
    # Multiplications in 1e9 from TransNeXt's table, which also counts some work outside matmuls.
    printed = {"micro": 2.7, "tiny": 5.7, "small": 10.3, "base": 18.4}[size]
    assert 0.98 * (printed - 0.05) < cost.input_flops / 2e9 < printed + 0.05


@pytest.mark.parametrize("case", first(transnext_toys.CASES, 3))
def test_transnext_cost_matches_built_model(case):
    """FLOPs by PyTorch's counter plus the products inside windows, which it does not see."""
    model = transnext_toys.model_of(transnext_toys.CASES[case])
    side = model.config.image_size
    cost = model_cost(model.config, (side // 4) ** 2)
    sizes = transnext_toys.SIZES
    widths = [side // 4 // 2**stage for stage in range(4)]
    windows = sum(
        2 * 9 * width**2 * size * depth
        for width, size, depth in zip(widths[:3], sizes["hidden_sizes"], sizes["depths"], strict=False)
    )
    assert counted_flops(lambda: model(torch.zeros(1, 3, side, side))) + FLOPS * windows == cost.input_flops
    named = dict(model.named_parameters())
    assert cost.parameters == sum(each.numel() for each in named.values())
    assert cost.attention_parameters == sum(each.numel() for name, each in named.items() if ".attn." in name)
    assert cost.new_parameters == sum(each.numel() for name, each in named.items() if ".mixers." in name)
    with pytest.raises(ValueError, match="length=17"):
        model_cost(model.config, 17)


@pytest.mark.parametrize("name", first(PUBLISHED_MIXTURES))
def test_moh_vit_parameters_match_table_1(name):
    """Parameters of table 1: 50 million (small) and 90 million (base)."""
    size, *counts = PUBLISHED_MIXTURES[name]
    fields = PUBLISHED_SIZES[size] | STAGES
    config = CrossheadTransNextConfig(**fields, num_labels=1000, mixers=mixture_of(fields, *counts))
    report = cost_report(config, 56 * 56)
    for part in ("cost", "stock"):
        assert f"{report[part]['parameters'] / 1e6:.0f}" == {"small": "50", "base": "90"}[size]
    assert report["cost"]["new_parameters"] == report["cost"]["parameters"] - report["stock"]["parameters"] > 0


@pytest.mark.parametrize(
    ("backbone", "case"), grid(toys.SHARED_ROTARY, {"plain": {}, **toys.SHARED_ROTARY_CASES}, strength=1)
)
@torch.no_grad()
def test_mla_and_gta_costs_match_built_model(backbone, case):
    mixers = {} if case == "plain" else toys.SHARED_ROTARY_CASES[case]
    model = toys.mixed_model(backbone, mixers, num_hidden_layers=2)
    if backbone in toys.LATENT:
        model.set_experts_implementation("eager")
    cost = model_cost(model.config, LENGTH)
    assert cost.parameters == model.num_parameters()
    past = model(IDS[:, :-1], past_key_values=DynamicCache(config=model.config)).past_key_values
    held = sum(x.numel() * 4 for layer in past.layers for x in (layer.keys, layer.values))
    with FlopCounterMode(display=False) as counter:
        model(IDS[:, -1:], past_key_values=past)
    attention = {
        part: sum(count.values()) for part, count in counter.get_flop_counts().items() if part.endswith("self_attn")
    }
    assert held == cost.kv_bytes_per_token * (LENGTH - 1)
    outside = [layer.mlp for layer in model.model.layers]
    assert sum(attention.values()) > 0 and len(outside) == len(attention) == 2
    assert cost.decode_flops - sum(attention.values()) == flops_without_attention(model)


def test_missing_num_experts_per_tok_is_refused_unless_dense():
    dense = toys.mixed_config("DeepseekV2", {}, num_experts_per_tok=None, first_k_dense_replace=2)
    cost = model_cost(dense, LENGTH)
    assert cost.active_parameters == cost.parameters
    with pytest.raises(ValueError, match="num_experts_per_tok=None"):
        model_cost(toys.mixed_config("DeepseekV2", {}, num_experts_per_tok=None), LENGTH)


def flops_without_attention(model):
    """FLOPs of one token outside attention: each matrix weight once, of experts only the selected ones."""
    config, total = model.config, model.lm_head.weight.numel()
    for layer in model.model.layers:
        for name, weight in layer.named_parameters():
            if weight.ndim > 1 and "self_attn." not in name:
                selected = config.num_experts_per_tok / config.n_routed_experts if ".experts." in name else 1
                total += weight.numel() * selected
    return FLOPS * total


@pytest.mark.parametrize("ending", ["ForSequenceClassification", "Model"])
def test_cost_of_decoder_without_language_model_head(ending):
    made = getattr(crosshead, f"CrossheadQwen3{ending}")
    config = toys.mixed_config("Qwen3", {"talking": {}}, num_labels=3, tie_word_embeddings=False)
    config.architectures = [made.__name__]
    model, report = made(config), cost_report(config, LENGTH)
    cost, head = report["cost"], config.hidden_size * 3 if ending != "Model" else 0
    assert cost["parameters"] == model.num_parameters()
    language = model_cost(toys.mixed_config("Qwen3", {"talking": {}}, tie_word_embeddings=False), LENGTH)
    vocabulary = config.vocab_size * config.hidden_size
    assert cost["input_flops"] == language.input_flops + FLOPS * (LENGTH * head - vocabulary)
    assert cost["training_multiplications"] == language.training_multiplications + 3 * (head - vocabulary)
    assert cost["decode_flops"] == cost["kv_bytes"] == report["stock"]["kv_bytes"] == 0
