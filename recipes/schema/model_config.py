"""Build and validate a crosshead configuration from a recipe's `model.config`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from crosshead.common.errors import RecipeError, one_line
from crosshead.modeling import BACKBONES
from crosshead.modeling.options import Choice, Integer, refuse, unknown

from .dit_config import dit_config
from .objectives import NEXT_TOKEN, Noise, ObjectiveOptions

DECODERS = "AutoModelForCausalLM"
CONFIGS: dict[str, type[Any]] = {config.model_type: config for config in BACKBONES}
"""`model_type` -> configuration class."""
UNDECLARED = {"head_dim"}
"""Keys that every decoder configuration accepts, although only some classes declare them as a field."""
CLASSIFIERS, CLASS_COUNT = "AutoModelForImageClassification", "num_labels"
"""Auto class of image classifiers, and the configuration key for their number of classes."""
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "sliding_window"),
    *("num_experts", "num_experts_per_tok", "decoder_sparse_step", "n_routed_experts", "n_group", "topk_group"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("embedding_size", "type_vocab_size", "num_hidden_groups", "inner_group_num"),
    *("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    *("hidden_sizes", "depths", "mlp_ratios", "sr_ratios", "patch_size", "num_channels", "num_labels"),
    *("image_size", "window_size"),
)
"""Keys that must be integers of at least 1, if present."""
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate")
"""Keys that must be numbers from 0 to 1, if present."""
LISTS = ("num_attention_heads", "hidden_sizes", "depths", "mlp_ratios", "sr_ratios", "image_size")
"""Sizes that may be a list: one number per stage of a hierarchical vision transformer, or height and width."""
ROPE_TYPES = ("default", *(name for name in ROPE_INIT_FUNCTIONS if name != "default"))
ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of `rope_parameters` that must be above 0, if the RoPE type uses them."""


def model_types(auto_class: str) -> list[str]:
    """Return the values of `model_type` that an Auto class can load."""
    return [name for name, config in CONFIGS.items() if auto_class in config.auto_classes]


def known_keys(kind: type[Any]) -> list[str]:
    """Return the keys of `model.config` that a configuration class accepts, without those of `PreTrainedConfig`."""
    undeclared = UNDECLARED if DECODERS in kind.auto_classes else set()
    if CLASSIFIERS in kind.auto_classes:
        undeclared = {CLASS_COUNT}
    return sorted(set(kind.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__) | undeclared)


def check_model_type(name: Any, objective: ObjectiveOptions) -> None:
    """Raise `RecipeError` if a supported family, converted or stock, lacks the head that the objective trains."""
    allowed, family = model_types(objective.auto_class), f"crosshead_{str(name).removeprefix('crosshead_')}"
    if family in CONFIGS and family not in allowed:
        raise RecipeError(
            f"the objective {objective.name} cannot train a model of model_type={name!r}: use one of "
            f"{', '.join(allowed)}, or another objective"
        )


def model_config(content: Mapping[str, Any], objective: ObjectiveOptions = NEXT_TOKEN) -> Any:
    """Build the configuration; raise `RecipeError` for an unknown key or an impossible value."""
    if isinstance(objective, Noise):
        return dit_config(content)
    fields = {key: value for key, value in content.items() if key != "model_type"}
    name = content.get("model_type")
    if not isinstance(name, str) or name not in CONFIGS:
        raise RecipeError(str(unknown("model.config", "model_type", name, model_types(objective.auto_class))))
    check_model_type(name, objective)
    kind = CONFIGS[name]
    # transformers accepts any key: a misspelt one would silently have no effect.
    known = known_keys(kind)
    for key in fields:
        if key not in known:
            raise RecipeError(str(unknown("model.config", "key", key, known)))
    with named_model_config():
        for key in SIZES:
            value = fields.get(key)
            for size in value if isinstance(value, list) and key in LISTS else [value]:
                Integer().parse(key, size, 0)
        config = kind(**fields)
        _check(config)
    return config


@contextmanager
def named_model_config() -> Iterator[None]:
    """Convert any error inside the block to a `RecipeError`: transformers' checks raise many exception types."""
    try:
        yield
    except Exception as error:
        raise RecipeError(f"model.config: {one_line(error)}") from None


def _check(config: Any) -> None:
    """Raise `ValueError` for values that transformers accepts although no model can be trained with them."""
    if DECODERS in config.auto_classes:
        _check_decoder(config)
    if hasattr(config, "hidden_act"):
        Choice(tuple(ACT2FN)).parse("hidden_act", config.hidden_act, 0)
    for key in DROPOUTS:
        value = getattr(config, key, 0.0)
        if not _is_number(value) or not 0 <= value <= 1:
            raise refuse(key, value, "use a number from 0 to 1")
    last, padding = getattr(config, "vocab_size", 0) - 1, getattr(config, "pad_token_id", None)
    if padding is not None and not 0 <= padding <= last:
        raise refuse("pad_token_id", padding, f"use a token of the vocabulary, from 0 to {last}, or leave it out")


def _check_decoder(config: Any) -> None:
    heads = config.layout_of_layer(0)
    if heads.query_heads % heads.key_value_heads:
        allowed = f"use a number that divides num_attention_heads={heads.query_heads}"
        raise refuse("num_key_value_heads", heads.key_value_heads, allowed)
    size = getattr(config, "head_dim", heads.head_dim)
    if not size or size % 2:  # RoPE rotates pairs of features
        raise refuse("head_dim", size, "use an even number (the default is hidden_size / num_attention_heads)")
    rotated = getattr(config, "qk_rope_head_dim", size)
    if size != rotated:
        raise refuse("head_dim", size, f"RoPE turns qk_rope_head_dim={rotated} features: leave it out")
    Choice(ROPE_TYPES).parse("rope_parameters.rope_type", config.rope_parameters.get("rope_type") or "", 0)
    for key in ROPE_NUMBERS:
        value = config.rope_parameters.get(key, 1)
        if not _is_number(value) or value <= 0:
            raise refuse(f"rope_parameters.{key}", value, "use a number above 0")
    for layer_type in getattr(config, "layer_types", None) or ():
        Choice(("full_attention", "sliding_attention")).parse("layer_types", layer_type, 0)
    _check_experts(config)


def _check_experts(config: Any) -> None:
    field = "n_routed_experts" if hasattr(config, "n_routed_experts") else "num_experts"
    experts = getattr(config, field, None)
    if experts is None or getattr(config, "first_k_dense_replace", 0) >= config.num_hidden_layers:
        return
    selected, groups = config.num_experts_per_tok, getattr(config, "n_group", None)
    if selected is None or selected > experts:
        raise refuse("num_experts_per_tok", selected, f"use a number from 1 to {field}={experts}")
    if groups is None:
        return
    if experts % groups:
        raise refuse("n_group", groups, f"use a number that divides {field}={experts}")
    if config.topk_group is None or config.topk_group > groups:
        raise refuse("topk_group", config.topk_group, f"use a number from 1 to n_group={groups}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_expert_bias(config: Any, rate: float | None) -> None:
    """Raise `RecipeError` if `train.expert_bias_rate` is set, but the model has no expert biases."""
    if rate is not None and not getattr(config, "expert_bias", False):
        raise RecipeError(
            f"train.expert_bias_rate={rate:g}, but the model has no expert_bias=true: leave it out, or train a "
            "Qwen3-MoE with it"
        )
