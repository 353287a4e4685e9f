"""Costs against the figures printed in the papers; each disagreement is asserted and explained."""

import pytest
import torch

from crosshead import (
    CrossheadDeepseekV3Config,
    CrossheadDeepseekV3Model,
    CrossheadGtaConfig,
    CrossheadGtaModel,
    CrossheadLlamaConfig,
    CrossheadLlamaModel,
    CrossheadT5Config,
    CrossheadT5Model,
)
from crosshead.evals.cost.counting import multiplications
from crosshead.evals.cost.model import model_cost
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout
from crosshead.modeling.mechanisms.talking import Talking, TalkingRules, talking_eager_attention_forward

HIDDEN, LENGTH = 768, 512
BOTH = ["logits", "weights"]
PARTS = ("encoder", "decoder", "cross")
# Talking-Heads, by table: (h_k, h, h_v, d_k, d_v), maps, parameters, multiplications in 1e9 as printed.
TALKING_HEADS = {
    "1": [
        ((6, 6, 6, 128, 128), [], 2359296, "1.611"),
        ((12, 12, 12, 64, 64), [], 2359296, "1.611"),
        ((24, 24, 24, 32, 32), [], 2359296, "1.611"),
        ((48, 48, 48, 16, 16), [], 2359296, "1.611"),
        ((6, 6, 6, 128, 128), BOTH, 2359368, "1.629"),
        ((12, 12, 12, 64, 64), BOTH, 2359584, "1.686"),
        ((24, 24, 24, 32, 32), BOTH, 2360448, "1.913"),
        ((48, 48, 48, 16, 16), BOTH, 2363904, "2.819"),
        ((24, 24, 24, 64, 64), [], 4718592, "3.221"),
    ],
    "2": [
        ((6, 6, 6, 128, 128), BOTH, 2359368, "1.629"),
        ((6, 24, 6, 128, 128), BOTH, 2359584, "1.686"),
        ((24, 6, 24, 32, 32), BOTH, 2359584, "1.686"),
        ((6, 24, 24, 128, 32), BOTH, 2360016, "1.799"),
        ((24, 24, 6, 32, 128), BOTH, 2360016, "1.799"),
        ((24, 24, 24, 32, 32), BOTH, 2360448, "1.913"),
    ],
    "3": [
        ((24, 24, 24, 32, 32), [], 2359296, "1.611"),
        ((24, 24, 24, 32, 32), ["logits"], 2359872, "1.762"),
        ((24, 24, 24, 32, 32), ["weights"], 2359872, "1.762"),
        ((24, 24, 24, 32, 32), BOTH, 2360448, "1.913"),
    ],
    "8": [
        ((12, 12, 12, 64, 64), [], 2359296, "1.611"),
        ((12, 12, 12, 64, 64), BOTH, 2359584, "1.686"),
        ((24, 24, 24, 32, 32), [], 2359296, "1.611"),
        ((24, 24, 24, 32, 32), BOTH, 2360448, "1.913"),
    ],
}
ROWS = [(table, *row) for table, rows in TALKING_HEADS.items() for row in rows]


def talking_layer(sizes, maps, dynamic=()):
    """Return parameters and multiplications of a layer of the paper's T5, where `n = m = 512` in every attention.

    The projections are computed, since no backbone here has such sizes; the attention is run and counted.
    """
    query_heads, softmax_heads, value_heads, key_dim, value_dim = sizes
    projections = 2 * HIDDEN * (query_heads * key_dim + value_heads * value_dim)
    with torch.device("meta"):
        hidden = torch.empty(1, LENGTH, HIDDEN)
        query = torch.empty(1, query_heads, LENGTH, key_dim)
        value = torch.empty(1, value_heads, LENGTH, value_dim)
        layout = HeadLayout(HIDDEN, query_heads, query_heads, key_dim, output_heads=value_heads)
        options = {"on": maps, "softmax_heads": softmax_heads, "dynamic": list(dynamic)}
        talking = Talking(layout, options) if maps else None

    def attend():
        state = AttentionState(hidden, hidden, query, query, value)
        if talking is not None:
            talking.before_rope(state)
            talking.attention_function(state, "eager", masked=False)
        talking_eager_attention_forward(torch.nn.Identity(), query, query, value, None, 1.0, **state.attention_kwargs)

    added = sum(parameter.numel() for parameter in talking.parameters()) if maps else 0
    return projections + added, projections * LENGTH + multiplications(attend)


def billions(count):
    return f"{count / 1e9:.3f}"


@pytest.mark.parametrize(("table", "sizes", "maps", "parameters", "printed"), ROWS)
def test_talking_heads_layer_costs_match_tables(table, sizes, maps, parameters, printed):
    held, counted = talking_layer(sizes, maps)
    assert held == parameters
    assert billions(counted) == printed


@pytest.mark.parametrize(
    ("heads", "size", "parameters", "printed"), [(12, 64, 2801952, "1.913"), (24, 32, 4129920, "2.819")]
)
def test_talking_heads_table_8_omits_applying_dynamic_maps(heads, size, parameters, printed):
    """Expected disagreement: the paper's figure counts the computation of the dynamic maps, not their application.

    Its pseudo-code (appendix A) applies four of them, each for `n m h h` multiplications. Crosshead adds the query
    maps to the static maps and applies the two key maps separately. (The figure is right for an implementation that
    adds the three maps of each query and key and applies their sum.)
    """
    held, counted = talking_layer((heads, heads, heads, size, size), BOTH, TalkingRules.options["dynamic"].allowed)
    assert held == parameters
    applied = 2 * LENGTH * LENGTH * heads * heads
    assert billions(counted) == {12: "1.988", 24: "3.121"}[heads]
    assert billions(counted - applied) == printed


@pytest.mark.parametrize("term", TalkingRules.options["dynamic"].allowed)
def test_talking_heads_table_9_single_dynamic_map(term):
    """One dynamic map. Expected disagreement: the paper leaves out the application of key maps, as in table 8."""
    held, counted = talking_layer((12, 12, 12, 64, 64), BOTH, [term])
    applied = LENGTH * LENGTH * 12 * 12 if term.startswith("key") else 0
    assert held == 2470176
    assert billions(counted - applied) == "1.743"


T5_LAYERS = [
    (heads, size, {"talking": {"on": maps}} if maps else {}, parameters, printed)
    for (heads, softmax_heads, value_heads, size, value_size), maps, parameters, printed in TALKING_HEADS["1"]
    + TALKING_HEADS["3"]
    if (softmax_heads, value_heads, value_size) == (heads, heads, size)
]


def t5_layers(heads, size, mixers):
    """Return parameters and multiplications of a T5 layer, per part, without the relative position biases."""
    sizes = {"d_model": HIDDEN, "num_heads": heads, "d_kv": size, "num_layers": 2}
    config = CrossheadT5Config(**sizes, vocab_size=8, mixers=mixers)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = CrossheadT5Model(config)
        hidden = torch.empty(1, LENGTH, HIDDEN)
    layers = {
        "encoder": model.encoder.block[1].layer[0].SelfAttention,
        "decoder": model.decoder.block[1].layer[0].SelfAttention,
        "cross": model.decoder.block[1].layer[1].EncDecAttention,
    }
    return {
        part: (
            sum(parameter.numel() for parameter in layer.parameters()),
            multiplications(lambda layer=layer, part=part: layer(hidden, None, hidden if part == "cross" else None)),
        )
        for part, layer in layers.items()
    }


@pytest.mark.parametrize(("heads", "size", "mixers", "parameters", "printed"), T5_LAYERS, ids=str)
def test_t5_layers_match_talking_heads_tables_1_and_3(heads, size, mixers, parameters, printed):
    """Rows with the same number of heads everywhere, computed with the T5 backbone."""
    for held, counted in t5_layers(heads, size, mixers).values():
        assert (held, billions(counted)) == (parameters, printed)


@pytest.mark.parametrize(("part", "dynamic"), [*zip(PARTS, [False] * 3, strict=True), ("encoder", True)])
def test_talking_heads_in_one_t5_part_match_tables_4_and_10(part, dynamic):
    """The other two parts have multi-head attention."""
    terms = TalkingRules.options["dynamic"].allowed if dynamic else []
    layers = t5_layers(24, 32, {part: {"talking": {"dynamic": terms}}})
    assert layers.pop(part)[0] == (4129920 if dynamic else 2360448)  # as in tables 8 and 1
    assert {(held, billions(counted)) for held, counted in layers.values()} == {(2359296, "1.611")}


def test_bilinear_form_of_talking_heads_table_1():
    """Expected disagreement: the paper counts the products with queries and weights for one head, crosshead for 12."""
    held, counted = t5_layers(12, 64, {"bilinear": {}})["encoder"]
    assert held == 14155776
    for_one_head = 2 * LENGTH * LENGTH * HIDDEN
    assert billions(counted) == "12.080"
    assert billions(counted - 11 * for_one_head) == "7.650"


def knocking_config(layers, mixers):
    """Return the config of section 3.4: `d = 1024`, `n = 32` and an MLP of size `3 d`."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 32, "intermediate_size": 3072, "vocab_size": 8}
    return CrossheadLlamaConfig(**sizes, num_hidden_layers=layers, mixers=mixers)


@pytest.mark.parametrize("mixers", [{"form": "linear", "on": ["query", "key", "value"]}, {"form": "mlp"}], ids=str)
def test_knocking_heads_training_overhead_of_section_3_4(mixers):
    def layer(mixers, length=2048):
        one, two = (model_cost(knocking_config(layers, mixers), length).training_flops for layers in (1, 2))
        return two - one

    added, stock = layer({"knocking": mixers}) - layer({}), layer({})
    feed_forward = 3 * 2 * 3 * 1024 * 3072  # three passes, two FLOPs, three matrices
    assert f"{added / stock:.2%}" == "0.55%"
    assert f"{added / (stock - feed_forward):.2%}" == "1.17%"


ONE_LAYER = {"hidden_size": 1536, "num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None}


def cached_numbers_per_token(model_class, config):
    """Run a model and return the numbers per token in its cache."""
    with torch.no_grad():
        cache = model_class(config)(torch.tensor([[3, 5, 7]]), use_cache=True).past_key_values
    return sum(x.numel() for layer in cache.layers for x in (layer.keys, layer.values)) / 3


@pytest.mark.parametrize(
    ("key_value_heads", "query_heads", "cache"), [(1, 32, 256), (8, 16, 2048), (4, 32, 1024), (16, 16, 4096)]
)
def test_knocking_heads_table_3_cache(key_value_heads, query_heads, cache):
    """Cached numbers per layer and token for MQA, GQA, GQA and MHA, with KHA-MLP and without."""
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": key_value_heads, "head_dim": 128}
    for mixers in ({}, {"knocking": {}}):
        config = CrossheadLlamaConfig(**heads, **ONE_LAYER, mixers=mixers)
        assert model_cost(config, 1).kv_bytes_per_token == 4 * cache
        assert cached_numbers_per_token(CrossheadLlamaModel, config) == cache


LAYERS = 18
"""Number of layers of model A0.8B-6.6B (table 5)."""


def attention_millions(key_value_heads, query_heads, **changes):
    """Return the attention parameters of all layers, in millions."""
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": key_value_heads, "head_dim": 128}
    config = changes.pop("config", CrossheadLlamaConfig)(**ONE_LAYER, **(heads | changes), mixers={})
    return LAYERS * model_cost(config, 1).attention_parameters / 1e6


@pytest.mark.parametrize(
    ("config", "key_value_heads", "query_heads", "activated"),
    [
        (CrossheadGtaConfig, 4, 32, 868),
        (CrossheadLlamaConfig, 1, 32, 859),
        (CrossheadLlamaConfig, 8, 16, 795),
        (CrossheadLlamaConfig, 16, 16, 852),
    ],
)
def test_knocking_heads_table_3_parameters(config, key_value_heads, query_heads, activated):
    """Activated parameters of GTA, MQA, GQA and MHA: 880 million for GQA with 4 of 32 heads, plus the difference.

    The paper does not print the sizes of the experts and the vocabulary, which all rows share.
    """
    apart = attention_millions(key_value_heads, query_heads, config=config) - attention_millions(4, 32)
    assert round(880 + apart) == activated


def test_knocking_heads_table_3_parameters_of_mla():
    """Expected disagreement: the paper prints 970 million, which 8 heads do not reach at any usual size."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes |= {"head_dim": 64, "intermediate_size": 64, "q_lora_rank": None, "config": CrossheadDeepseekV3Config}
    assert round(880 + attention_millions(8, 8, **sizes) - attention_millions(4, 32)) == 731
    # Nor does it with all 32 query heads.
    assert round(880 + attention_millions(32, 32, **sizes) - attention_millions(4, 32)) == 1000


@pytest.mark.parametrize("form", (None, "linear", "mlp"))
@pytest.mark.parametrize("variant", ("MLA", "GTA"))
def test_knocking_heads_table_3_cache_of_mla_and_gta(variant, form):
    """Both cache 512 + 64 numbers: MLA's latent vector and rotary part; GTA's 4 tied states of 128 and half a head."""
    mixers = {} if form is None else {"knocking": {"form": form}}
    if variant == "MLA":
        sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64}
        config, model = CrossheadDeepseekV3Config(**ONE_LAYER, **sizes, mixers=mixers), CrossheadDeepseekV3Model
    else:
        heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        config, model = CrossheadGtaConfig(**ONE_LAYER, **heads, mixers=mixers), CrossheadGtaModel
    assert model_cost(config, 8).kv_bytes_per_token == 4 * (512 + 64)
    assert cached_numbers_per_token(model, config) == 512 + 64


@pytest.mark.parametrize(
    ("printed", "layers", "hidden", "intermediate", "heads", "size", "routed"),
    [
        (186, 12, 768, 2048, 12, 64, False),
        (186, 12, 768, 2048, 12, 64, True),
        (881, 24, 1536, 4096, 16, 96, False),
        (882, 24, 1536, 4096, 16, 96, True),
    ],
    ids=["LLM-S", "MoH-LLM-S", "LLM-B", "MoH-LLM-B"],
)
def test_mixture_of_head_table_c_parameters(printed, layers, hidden, intermediate, heads, size, routed):
    """Millions of parameters, with LLaMA2's vocabulary extended to 65,536 tokens and an untied head."""
    config = CrossheadLlamaConfig(
        vocab_size=65536,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        head_dim=size,
        tie_word_embeddings=False,
        mixers={"mixture": {"active_heads": heads * 3 // 4}} if routed else {},
    )
    assert round(model_cost(config, 2048).parameters / 1e6) == printed
