"""The cases of the suite: backbone and mixers of each case, and its stock baseline.

Every mechanism runs on Llama, and at least one on each other backbone: `explicit` with fewer component heads on Qwen3,
whose k-norm does not commute with the combination; `knocking` on Qwen2, whose projections have a bias; `mixture` on
Qwen3-MoE, which has its own balance loss. The encoders cover the other mechanisms. A new mechanism adds one line to
`OURS`.
"""

from dataclasses import dataclass, field
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 3,
}

BACKBONES: dict[str, str] = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gta": "Gta",
    "bert": "Bert",
    "albert": "Albert",
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "Dinov2",
    "transnext": "TransNext",
    "t5": "T5",
}
"""Model type -> prefix of the class names."""
ENCODERS = ("bert", "albert")
IMAGES = ("vit", "deit", "dinov2", "transnext")
SEQ2SEQ = ("t5",)
COMPARED = {"gta": "llama", "transnext": "vit"}
"""Backbone without a stock class -> backbone whose stock class is its baseline."""

ENCODER_SIZES: dict[str, Any] = {
    "num_labels": 2,
    "head_dim": None,
    "num_key_value_heads": None,
    "attention_probs_dropout_prob": 0.0,
}
LATENT_SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
IMAGE_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    "image_size": 16,
    "patch_size": 8,
}
EXTRA_SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": None},  # Qwen2 has no such field: its head size is hidden_size / num_attention_heads
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v2": LATENT_SIZES | {"q_lora_rank": None},
    "deepseek_v3": LATENT_SIZES | {"q_lora_rank": 10},
    "bert": ENCODER_SIZES,
    "albert": {**ENCODER_SIZES, "embedding_size": 16},
    "t5": {
        **dict.fromkeys(set(SIZES) - {"vocab_size", "pad_token_id", "eos_token_id"}),
        "d_model": SIZES["hidden_size"],
        "d_kv": SIZES["head_dim"],
        "d_ff": SIZES["intermediate_size"],
        "num_layers": SIZES["num_hidden_layers"],
        "num_heads": SIZES["num_attention_heads"],
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "vit": IMAGE_SIZES,
    "deit": IMAGE_SIZES,
    "dinov2": {**IMAGE_SIZES, "intermediate_size": None, "mlp_ratio": 2},
    "transnext": {
        **dict.fromkeys(set(SIZES) - {"num_labels"}),
        "image_size": 16,
        "hidden_sizes": [16, SIZES["hidden_size"]],
        "num_attention_heads": [SIZES["num_attention_heads"]] * 2,
        "depths": [1, 1],
        "mlp_ratios": [2, 2],
        "sr_ratios": [2, 1],
    },
}


@dataclass(frozen=True)
class Case:
    """One pytest run: a backbone and, for our classes, the `mixers` of its config."""

    backbone: str
    mixers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the case, such as `knocking+mixture-llama` or `stock-llama`."""
        return f"{'+'.join(self.mixers) or 'stock'}-{self.backbone}"

    @property
    def baseline(self) -> str:
        """Name of the stock case that is the baseline."""
        return Case(COMPARED.get(self.backbone, self.backbone)).name

    @property
    def prefix(self) -> str:
        """Prefix of the class names of the case."""
        return ("Crosshead" if self.mixers else "") + BACKBONES[self.backbone]

    def config_kwargs(self) -> dict[str, Any]:
        """The arguments of the config class."""
        sizes = {**SIZES, **EXTRA_SIZES.get(self.backbone, {})}
        sizes = {key: value for key, value in sizes.items() if value is not None}
        return {**sizes, "mixers": self.mixers} if self.mixers else sizes


EXPLICIT = {"explicit": {"key_heads": 1, "value_heads": 1}}
MIXTURE = {"mixture": {"shared_heads": 1, "active_heads": 3}}

BASELINES: list[Case] = [Case(backbone) for backbone in BACKBONES if backbone not in COMPARED]
OURS: list[Case] = [
    Case("llama", {"knocking": {}}),
    Case("llama", EXPLICIT),
    Case("llama", MIXTURE),
    Case("llama", {"talking": {}}),
    Case("llama", {"differential": {}}),
    Case("llama", {"gating": {}}),
    Case("llama", {"knocking": {}, **MIXTURE}),
    Case("qwen2", {"knocking": {}}),
    Case("qwen3", EXPLICIT),
    Case("qwen3_moe", MIXTURE),
    Case("deepseek_v2", {"knocking": {}, **MIXTURE}),
    Case("deepseek_v3", {"talking": {}}),
    Case("gta", {"knocking": {}, **MIXTURE}),
    Case("bert", {"knocking": {}, **MIXTURE}),
    Case("bert", {"talking": {}}),
    Case("albert", EXPLICIT),
    Case("albert", {"differential": {}}),
    Case("vit", MIXTURE),
    Case("deit", {"talking": {}}),
    Case("dinov2", MIXTURE),
    Case("transnext", MIXTURE),
    Case("t5", {"talking": {}, **MIXTURE}),
    Case("t5", EXPLICIT),
]
CASES: dict[str, Case] = {case.name: case for case in BASELINES + OURS}


def select(substring: str) -> list[Case]:
    """The cases whose name contains `substring`, after the baselines that they are compared with."""
    chosen = [case for case in CASES.values() if substring in case.name]
    needed = {case.baseline for case in chosen}
    return [case for case in BASELINES if case.name in needed] + [case for case in chosen if case.mixers]
