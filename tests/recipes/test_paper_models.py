"""The models of the papers' recipes against sizes copied from the papers' tables and sections."""

import pytest

from crosshead.recipes.schema.recipe import load_recipe

KHA_HEADS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
HALF = {"key_heads": 2, "value_heads": 2}
MODELS = {  # Knocking-Heads, table 5, sections 4.1 and 4.4; Mixture-of-Head, tables 3, 4, C, E and F, section 4.4
    "kha_dense_0.61b": {"num_hidden_layers": 24, "hidden_size": 1024, **KHA_HEADS},
    "kha_dense_1.68b": {"num_hidden_layers": 24, "hidden_size": 2048, **KHA_HEADS},
    "kha_dense_3.94b": {"num_hidden_layers": 36, "hidden_size": 2560, **KHA_HEADS},
    "kha_moe_a0.8b_6.6b": {"num_hidden_layers": 18, "hidden_size": 1536, "num_experts": 64, **KHA_HEADS},
    "moh_llm_s": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "head_dim": 64,
        "mixture": {"active_heads": 9, "router": "two_stage", "gate": "weighted", "balance_weight": 0.01},
    },
    "moh_llm_b": {
        "num_hidden_layers": 24,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "head_dim": 96,
        "mixture": {"active_heads": 12, "router": "two_stage", "gate": "weighted", "balance_weight": 0.01},
    },
    "moh_llama3_8b_stage1": {"vocab_size": 160896, "num_hidden_layers": 32, "hidden_size": 4096},
    "moh_llama3_8b_stage2": {
        "vocab_size": 160896,
        "num_attention_heads": 32,
        "mixture": {
            "active_heads": 24,
            "shared_heads": 16,
            "router": "query_norm",
            "gate": "binary",
            "balance_weight": 0.01,
        },
    },
    # Talking-Heads, sections 7.1 and 7.2
    "talking_t5_base": {
        "num_layers": 12,
        "num_decoder_layers": 12,
        "d_model": 768,
        "d_ff": 3072,
        "num_heads": 12,
        "d_kv": 64,
        "dropout_rate": 0.0,
    },
    "talking_albert_base": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "embedding_size": 768,
        "num_attention_heads": 12,
    },
    # Explicit Attention, sections 5.1.1 and 5.2.1: Llama-3.2-1B untied; Qwen3-30B-A3B, layers counted from 1
    "mea_1b": {"num_hidden_layers": 16, "hidden_size": 2048, "tie_word_embeddings": False, "explicit": {"norm": True}},
    "mea_qwen3_30b_full": {"num_hidden_layers": 48, "explicit": HALF},
    "mea_qwen3_30b_half": {"explicit": HALF | {"layers": list(range(12 - 1, 35))}},
    "mea_qwen3_30b_deep": {"explicit": HALF | {"layers": list(range(3, 48))}},
}


@pytest.mark.parametrize("name", MODELS)
def test_model_configs_equal_paper_tables(name):
    config = load_recipe(f"papers/{name}").model.config
    flat = config | config.get("mixers", {})
    for key, value in MODELS[name].items():
        actual = {part: flat[key].get(part) for part in value} if isinstance(value, dict) else flat[key]
        assert actual == value, key


MOH_VIT = load_recipe("papers/moh_vit_s")
VIT = MOH_VIT.model.config


def test_moh_vit_is_transnext_small_with_published_heads():
    sizes = {
        "hidden_sizes": [72, 144, 288, 576],
        "num_attention_heads": [3, 6, 12, 24],
        "depths": [5, 5, 22, 5],
        "image_size": 224,
        "num_labels": 1000,
    }
    assert {key: VIT[key] for key in sizes} == sizes
    assert VIT["mixers"] == {
        "mixture": {
            "active_heads": [3] * 5 + [6] * 5 + [9] * 22 + [16] * 5,
            "shared_heads": [3] * 5 + [6] * 5 + [3] * 22 + [4] * 5,
            "router": "two_stage",
            "gate": "weighted",
            "balance_weight": 0.01,
        }
    }


def test_moh_vit_has_three_quarters_of_heads_active():
    """Share of active heads in table 1 of Mixture-of-Head."""
    heads = sum(heads * depth for heads, depth in zip(VIT["num_attention_heads"], VIT["depths"], strict=True))
    assert sum(VIT["mixers"]["mixture"]["active_heads"]) / heads == pytest.approx(0.75, abs=0.01)


def test_moh_vit_augmentations_equal_published_code():
    """Appendix B.1 names them: random augmentation, mixup, CutMix, random erasing, label smoothing and drop path."""
    settings = {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "operations": 2, "magnitude": 9, "erasing": 0.25}
    assert {key: getattr(MOH_VIT.objective, key) for key in settings} == settings
    assert MOH_VIT.objective.crop == 0.08 and MOH_VIT.objective.flip and VIT["drop_path_rate"] == 0.45
