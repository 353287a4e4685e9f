"""Toy models for the tests: every backbone, every mechanism, random weights without symmetry."""

import math
from typing import Any

import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import crosshead

BACKBONES = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
"""Decoders without shared rotary keys."""
LATENT = ("DeepseekV2", "DeepseekV3")
"""Decoders with MLA."""
SHARED_ROTARY = (*LATENT, "Gta")
"""Decoders whose key heads share their rotary part (MLA and GTA); they refuse some mechanisms."""
ENCODERS = ("Bert", "Albert")
STOCK: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "Qwen3Moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "DeepseekV2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "DeepseekV3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "Gta": (crosshead.CrossheadGtaConfig, crosshead.CrossheadGtaForCausalLM),  # transformers has no GTA
    "Bert": (BertConfig, BertForMaskedLM),
    "Albert": (AlbertConfig, AlbertForMaskedLM),
    "T5": (T5Config, T5ForConditionalGeneration),
}
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXTRA_SIZES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
LATENT_SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,  # in these configs, the size of the RoPE part
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
EXTRA_SIZES |= {"DeepseekV2": {**LATENT_SIZES, "q_lora_rank": None}, "DeepseekV3": LATENT_SIZES}
ENCODER_SIZES: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim", "hidden_size")},
    "hidden_size": 32,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
T5_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
IMAGE_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
}
EXTRA_SIZES |= {"Albert": {"embedding_size": 16, "classifier_dropout_prob": 0.0}}

MECHANISM_CASES: dict[str, dict[str, Any]] = {
    "knocking": {"knocking": {"on": ["value", "key"]}},
    "explicit": {"explicit": {"key_heads": 1, "value_heads": [1, 2]}},
    "mixture": {"mixture": {"shared_heads": 2, "active_heads": 3}},
    "talking": {
        "talking": {"softmax_heads": 6, "dynamic": ["query_logits", "key_logits", "query_weights", "key_weights"]}
    },
    "differential": {"differential": {}},
}
NOT_ROTARY = ("bilinear",)
"""Mechanisms that require a backbone without RoPE."""
OF_DECODERS = tuple(name for name in crosshead.MECHANISMS if name not in NOT_ROTARY)
MECHANISM_CASES |= {name: {name: {}} for name in OF_DECODERS if name not in MECHANISM_CASES}
"""One representative configuration per mechanism; mechanisms without an entry above run with their defaults."""
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "knocking+mixture": {
        "knocking": {"form": "linear", "on": ["query", "key", "value"]},
        "mixture": {"shared_heads": 1, "active_heads": 3, "router": "query_norm", "gate": "binary"},
    },
    "explicit+talking+mixture": {
        "explicit": {"key_heads": 2, "value_heads": 1},
        "talking": {"dynamic": ["key_logits"]},
        "mixture": {"shared_heads": 2, "active_heads": 3, "gate_scale": "paper"},
    },
    "knocking+explicit+differential": {
        "knocking": {},
        "explicit": {"norm": False, "value_heads": 1, "layers": [1]},
        "differential": {},
    },
    "paired queries": {"differential": {"version": 2}, "knocking": {"on": ["query", "value"]}},
}
CASES = MECHANISM_CASES | COMPOSITIONS
ENCODER_CASES: dict[str, dict[str, Any]] = {name: MECHANISM_CASES[name] for name in OF_DECODERS} | {
    "bilinear": {"bilinear": {}},
    "bilinear+mixture": {"bilinear": {}, "mixture": {"shared_heads": 2, "active_heads": 3}},
    "explicit": {"explicit": {"key_heads": 1, "value_heads": 2}},
    "knocking+mixture": COMPOSITIONS["knocking+mixture"],
    "explicit+talking+mixture": COMPOSITIONS["explicit+talking+mixture"],
    "knocking+explicit+differential": {
        "knocking": {"form": "gate"},
        "explicit": {"norm": False, "value_heads": 2},
        "differential": {"half_values": True},
    },
}
"""Cases for encoders: no options that differ between layers, as layers may share their weights (ALBERT)."""
SHARED_ROTARY_CASES: dict[str, dict[str, Any]] = {
    "knocking": {"knocking": {"on": ["value", "query"]}},
    **{name: MECHANISM_CASES[name] for name in OF_DECODERS if name not in ("knocking", "explicit")},
    "talking": {"talking": {"softmax_heads": 6, "dynamic": ["query_logits", "query_weights"]}},
    "knocking+mixture": {
        "knocking": {"form": "linear", "on": ["query", "value"]},
        "mixture": {"shared_heads": 1, "active_heads": 3, "router": "query_norm", "gate": "binary"},
    },
    "gating+talking+mixture": {
        "gating": {"layers": [1]},
        "talking": {"dynamic": ["query_logits"]},
        "mixture": {"shared_heads": 2, "active_heads": 3, "gate_scale": "paper"},
    },
    "knocking+differential": {"knocking": {"form": "gate"}, "differential": {"norm": False}},
}
"""Cases for SHARED_ROTARY decoders."""
CASES_OF = dict.fromkeys((*ENCODERS, "T5"), ENCODER_CASES) | dict.fromkeys(SHARED_ROTARY, SHARED_ROTARY_CASES)
"""Cases per backbone; backbones that are not listed use `CASES`."""


def sizes(backbone: str) -> dict[str, Any]:
    """Return the size fields of a tiny configuration."""
    if backbone == "T5":
        return T5_SIZES
    return (ENCODER_SIZES if backbone in ENCODERS else SIZES) | EXTRA_SIZES.get(backbone, {})


def mixers_of(case: str, backbone: str) -> dict[str, Any]:
    """Return the `mixers` of a case for a backbone."""
    return CASES_OF.get(backbone, CASES)[case]


def model_class(backbone: str) -> Any:
    """Return the crosshead language model class of a backbone."""
    task = "ConditionalGeneration" if backbone == "T5" else "MaskedLM" if backbone in ENCODERS else "CausalLM"
    return getattr(crosshead, f"Crosshead{backbone}For{task}")


def stock_config(backbone: str, **changes: Any) -> PreTrainedConfig:
    """Return a tiny stock configuration."""
    return STOCK[backbone][0](**(sizes(backbone) | changes))


def mixed_config(backbone: str, mixers: dict[str, Any], **changes: Any) -> Any:
    """Return a tiny crosshead configuration."""
    config_class = getattr(crosshead, f"Crosshead{backbone}Config")
    return config_class(**(sizes(backbone) | changes), mixers=mixers)


def stock_model(backbone: str, backend: str = "eager", **changes: Any) -> Any:
    """Return a tiny stock language model with lopsided weights."""
    config = stock_config(backbone, **changes)
    config._attn_implementation = backend
    return lopsided(STOCK[backbone][1](config)).eval()


def mixed_model(backbone: str, mixers: dict[str, Any], backend: str | None = "eager", **changes: Any) -> Any:
    """Return a tiny crosshead language model with lopsided weights."""
    config = mixed_config(backbone, mixers, **changes)
    if backend is not None:
        config._attn_implementation = backend
    return lopsided(model_class(backbone)(config)).eval()


@torch.no_grad()
def lopsided(model: Any, seed: int = 0) -> Any:
    """Fill every parameter with random values that grow towards later rows, so that swapped heads are detected."""
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        slope = torch.linspace(0.5, 1.5, parameter.shape[0], dtype=torch.float64)
        slope = slope.reshape(-1, *[1] * (parameter.ndim - 1))
        if parameter.ndim == 1:
            values = (1.0 if "norm" in name else 0.0) + 0.3 * noise * slope
        else:
            values = noise * slope / math.sqrt(parameter.shape[-1])
        parameter.copy_(values.to(parameter.dtype))
    return model


def tokens(batch: int = 2, length: int = 9, seed: int = 1, vocabulary: int = 61) -> torch.Tensor:
    """Return random token ids (batch, length) without the padding token."""
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


NEUTRAL: dict[str, list[dict[str, Any]]] = {
    "knocking": [{"knocking": {"form": form, "on": ["query", "key", "value"]}} for form in ("mlp", "linear", "gate")],
    "explicit": [{"explicit": {"norm": False}}, {"explicit": {"norm": False, "groups": 2}}],
    "mixture": [
        {"mixture": {"active_heads": 4, "router": router, "gate": "binary"}} for router in ("two_stage", "query_norm")
    ],
    "talking": [{"talking": {}}, {"talking": {"on": ["logits"]}}],
    "differential": [],
    "gating": [{"gating": {}}],
    "bilinear": [],
}
"""Configurations that at initialisation compute the same as the stock model, by mechanism."""
