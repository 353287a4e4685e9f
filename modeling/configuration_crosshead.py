"""Configurations: the stock backbones' own, plus the field `mixers`."""

import json
import os
from typing import TYPE_CHECKING, Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from .access_tokens import without_tokens
from .mixer import HeadLayout, Settings
from .settings import complete_mixers, layer_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as ConfigBase
else:
    # A plain class at run time: as a configuration of its own it would override the stock fields' defaults.
    ConfigBase = object

AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
}
"""The Auto classes that a published folder serves -> the ending of our class's name."""


def shared_plan(config: Any) -> dict[str, str]:
    """The stock tensor-parallel plan without attention: mechanisms work across all heads, a device has some."""
    return {module: split for module, split in config.base_model_tp_plan.items() if ".self_attn." not in module}


class MixersConfig(ConfigBase):
    """The part that the four configurations share: `mixers`, an ordered mapping of mechanism to options."""

    has_key_norm = False
    keys_to_ignore_at_inference = ["past_key_values", "balance_loss", "head_router_scores"]
    mixers: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check and complete `mixers`, and name the files that load the model where crosshead is not installed.

        A stock configuration's `model_type` would stay on the instance and mislead saving and loading.
        """
        self._check_family(kwargs.get("model_type"))
        own = {key: value for key, value in kwargs.items() if key not in ("model_type", "auto_map")}
        super().__post_init__(**own)
        family = type(self).__name__.removesuffix("Config")
        code = {"AutoConfig": f"configuration_crosshead.{family}Config"}
        code |= {auto: f"modeling_crosshead.{family}{ending}" for auto, ending in AUTO_CLASSES.items()}
        self.auto_map = code
        self.validate()  # the stock checks, which the library runs for the stock class only
        self.check_mixers()

    def _check_family(self, model_type: str | None) -> None:
        own = type(self).model_type
        allowed = (own.removeprefix("crosshead_"), own)
        if model_type not in (None, *allowed):
            raise ValueError(
                f"{type(self).__name__} cannot take a configuration of model_type={model_type!r}: allowed are "
                f"{' and '.join(map(repr, allowed))}"
            )

    def check_mixers(self) -> None:
        """Bring `mixers` into its complete form; `ValueError` where it does not fit the model."""
        self.mixers = complete_mixers({} if self.mixers is None else self.mixers, self.layouts())

    def layout_of_layer(self, layer: int) -> HeadLayout:
        """What the mechanisms may know of one layer."""
        return HeadLayout(
            hidden_size=self.hidden_size,
            query_heads=self.num_attention_heads,
            key_value_heads=self.num_key_value_heads,
            head_dim=getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads,
            layer_index=layer,
            norm_eps=self.rms_norm_eps,
            key_norm_eps=self.rms_norm_eps if self.has_key_norm else None,
            dropout=self.attention_dropout or 0.0,
        )

    def layouts(self) -> list[HeadLayout]:
        """What they may know of each layer."""
        return [self.layout_of_layer(layer) for layer in range(self.num_hidden_layers)]

    def mixers_of_layer(self, layer: int) -> dict[str, Settings]:
        """The mechanisms of one layer with their complete options, in the order they apply."""
        return layer_settings(self.mixers or {}, layer)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a dictionary, a stock backbone's too; fields given beside it take part in every check."""
        beside = [key for key in kwargs if key in cls.__dataclass_fields__ and key != "dtype"]  # that may be "auto"
        # A saved field may go by another name, which is set last.
        given = {cls.attribute_map.get(key, key): kwargs.pop(key) for key in beside}
        if "num_hidden_layers" in given and config_dict.get("layer_types"):
            given = {"layer_types": config_dict["layer_types"][: given["num_hidden_layers"]]} | given
        return super().from_dict(config_dict | given, **kwargs)

    def to_json_string(self, use_diff: bool = True) -> str:
        """JSON with sorted keys, except `mixers`, whose order means something; access tokens are left out."""
        content, _ = without_tokens(json.loads(super().to_json_string(use_diff)))
        content["mixers"] = self.mixers
        return json.dumps(content, indent=2) + "\n"

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save, after one more check: `mixers` or what they depend on may have changed."""
        self.check_mixers()
        super().save_pretrained(save_directory, push_to_hub, **kwargs)


class CrossheadLlamaConfig(MixersConfig, LlamaConfig):
    """`LlamaConfig` plus `mixers`."""

    model_type = "crosshead_llama"
    base_model_tp_plan = shared_plan(LlamaConfig)
    mixers: dict[str, Any] | None = None


class CrossheadQwen2Config(MixersConfig, Qwen2Config):
    """`Qwen2Config` plus `mixers`."""

    model_type = "crosshead_qwen2"
    base_model_tp_plan = shared_plan(Qwen2Config)
    mixers: dict[str, Any] | None = None


class CrossheadQwen3Config(MixersConfig, Qwen3Config):
    """`Qwen3Config` plus `mixers`."""

    model_type = "crosshead_qwen3"
    base_model_tp_plan = shared_plan(Qwen3Config)
    has_key_norm = True
    mixers: dict[str, Any] | None = None


class CrossheadQwen3MoeConfig(MixersConfig, Qwen3MoeConfig):
    """`Qwen3MoeConfig` plus `mixers`, and `expert_bias`, which is in config.json only where it is true."""

    model_type = "crosshead_qwen3_moe"
    base_model_tp_plan = shared_plan(Qwen3MoeConfig)
    has_key_norm = True
    mixers: dict[str, Any] | None = None
    expert_bias: bool = False
    """Routers choose experts with a bias, by which training evens out their load without a loss."""

    def __post_init__(self, **kwargs: Any) -> None:
        """As of every configuration of ours, with the one field more."""
        super().__post_init__(**kwargs)
        if not isinstance(self.expert_bias, bool):
            raise ValueError(f"expert_bias={self.expert_bias!r} is not allowed: use true or false")

    def to_dict(self) -> dict[str, Any]:
        """All fields, of which config.json is made."""
        content: dict[str, Any] = super().to_dict()
        if not self.expert_bias:
            del content["expert_bias"]
        return content
