"""A recipe's `model.config` as a configuration of ours."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from crosshead.modeling.configuration_crosshead import (
    CrossheadLlamaConfig,
    CrossheadQwen2Config,
    CrossheadQwen3Config,
    CrossheadQwen3MoeConfig,
)
from crosshead.modeling.options import unknown

from .errors import RecipeError, one_line

CONFIGS: dict[str, type[Any]] = {
    config.model_type: config
    for config in (CrossheadLlamaConfig, CrossheadQwen2Config, CrossheadQwen3Config, CrossheadQwen3MoeConfig)
}
"""What a recipe may call `model_type`."""
BESIDE = {"head_dim"}
"""Understood by every family, declared by some."""


def model_config(content: Mapping[str, Any]) -> Any:
    """The configuration; `RecipeError` where a key is unknown or a value cannot be."""
    fields = {key: value for key, value in content.items() if key != "model_type"}
    name = content.get("model_type")
    if name not in CONFIGS:
        raise RecipeError(str(unknown("model.config", "model_type", name, list(CONFIGS))))
    kind = CONFIGS[name]
    # The library takes any key, and a misspelt one would do nothing.
    known = sorted(set(kind.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__) | BESIDE)
    for key in fields:
        if key not in known:
            raise RecipeError(str(unknown("model.config", "key", key, known)))
    try:
        return kind(**fields)
    except Exception as error:  # the library's own checks raise whatever the value breaks
        raise RecipeError(f"model.config: {one_line(error)}") from None


def check_expert_bias(config: Any, rate: float | None) -> None:
    """`RecipeError` where biases are to move that the model has not."""
    if rate is not None and not getattr(config, "expert_bias", False):
        raise RecipeError(
            f"train.expert_bias_rate={rate:g}, but the model chooses its experts without a bias: leave it out, or "
            "train one with expert_bias=true"
        )
