"""A recipe's `model.config` as a configuration of ours."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from crosshead.common.errors import RecipeError, one_line
from crosshead.modeling import BACKBONES
from crosshead.modeling.options import Choice, Integer, refuse, unknown

from .text_values import Range

CONFIGS: dict[str, type[Any]] = {config.model_type: config for config in BACKBONES}
"""What a recipe may call `model_type`."""
BESIDE = {"head_dim"}
"""Understood by every family, declared by some."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "sliding_window",
)
"""Whole numbers from 1 up, where they are given."""
ACTIVATIONS = Choice(tuple(ACT2FN))
ROPE_TYPES = Choice(("default", *(name for name in ROPE_INIT_FUNCTIONS if name != "default")))
LAYER_TYPES = Choice(("full_attention", "sliding_attention"))
ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Above 0, where the kind of rope has them."""


def model_config(content: Mapping[str, Any]) -> Any:
    """The configuration; `RecipeError` where a key is unknown or a value cannot be."""
    fields = {key: value for key, value in content.items() if key != "model_type"}
    name = content.get("model_type")
    if not isinstance(name, str) or name not in CONFIGS:
        raise RecipeError(str(unknown("model.config", "model_type", name, list(CONFIGS))))
    kind = CONFIGS[name]
    # The library takes any key, and a misspelt one would do nothing.
    known = sorted(set(kind.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__) | BESIDE)
    for key in fields:
        if key not in known:
            raise RecipeError(str(unknown("model.config", "key", key, known)))
    with named_model_config():
        for key in SIZES:
            Integer().parse(key, fields.get(key), 0)
        config = kind(**fields)
        _check_heads(config)
        _check_rope(config.rope_parameters)
        _check_rest(config)
    return config


@contextmanager
def named_model_config() -> Iterator[None]:
    """`RecipeError` for whatever the library refuses: its own checks raise what the value breaks."""
    try:
        yield
    except Exception as error:
        raise RecipeError(f"model.config: {one_line(error)}") from None


def _check_heads(config: Any) -> None:
    """Each key/value head serves as many query heads, and positions rotate a head's numbers in pairs."""
    heads = config.layout_of_layer(0)
    if heads.query_heads % heads.key_value_heads:
        allowed = f"use a number that divides num_attention_heads={heads.query_heads}"
        raise refuse("num_key_value_heads", heads.key_value_heads, allowed)
    size = getattr(config, "head_dim", heads.head_dim)
    if not size or size % 2:
        raise refuse("head_dim", size, "use an even number (not given, it is hidden_size by num_attention_heads)")


def _check_rope(rope: Mapping[str, Any]) -> None:
    ROPE_TYPES.parse("rope_parameters.rope_type", rope.get("rope_type") or "", 0)
    for key in ROPE_NUMBERS:
        _check_number(f"rope_parameters.{key}", rope.get(key, 1), Range(0, low_itself=False))


def _check_rest(config: Any) -> None:
    ACTIVATIONS.parse("hidden_act", config.hidden_act, 0)
    _check_number("attention_dropout", config.attention_dropout, Range(0, 1))
    for layer_type in getattr(config, "layer_types", None) or ():
        LAYER_TYPES.parse("layer_types", layer_type, 0)
    last, padding = config.vocab_size - 1, config.pad_token_id
    if padding is not None and not 0 <= padding <= last:
        raise refuse("pad_token_id", padding, f"use a token of the vocabulary, from 0 to {last}, or leave it out")
    experts = getattr(config, "num_experts", None)
    if experts is not None and config.num_experts_per_tok > experts:
        raise refuse("num_experts_per_tok", config.num_experts_per_tok, f"use at most num_experts={experts}")


def _check_number(name: str, value: Any, allowed: Range) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, value, "use a number")
    allowed.check(name, value)


def check_expert_bias(config: Any, rate: float | None) -> None:
    """`RecipeError` where biases are to move that the model has not."""
    if rate is not None and not getattr(config, "expert_bias", False):
        raise RecipeError(
            f"train.expert_bias_rate={rate:g}, but the model chooses its experts without a bias: leave it out, or "
            "train one with expert_bias=true"
        )


def check_length(config: Any, length: int) -> None:
    """`RecipeError` where those who use the model would cut texts shorter than it was trained on."""
    most = config.max_position_embeddings
    if length > most:
        raise RecipeError(
            f"data.length={length} is more than model.config.max_position_embeddings={most}: lower it, or raise that"
        )
