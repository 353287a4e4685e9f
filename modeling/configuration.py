"""Configurations: the fields of a stock backbone plus `mixers`, an ordered mapping of mechanism to options.

`mixers` is checked and completed with defaults when a configuration is made, then read layer by layer.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends import ENGINES, logger
from .mechanisms import RULES
from .mechanisms.base import HeadLayout, Settings, package_only
from .options import Layers, refuse, unknown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as ConfigBase
else:  # a plain class: a subclass of PreTrainedConfig would override the defaults of the stock fields
    ConfigBase = object
LAYERS = "layers"


def complete_mixers(mixers: Any, layouts: list[HeadLayout]) -> dict[str, Settings]:
    """Return `mixers` with every default filled in, order kept; raise `ValueError` if a layer cannot have them."""
    if not isinstance(mixers, Mapping):
        raise refuse("mixers", mixers, "use a mapping of mechanism to options")
    complete = {name: _complete(name, options, layouts) for name, options in mixers.items()}
    for layout in layouts:
        check_layer(layer_settings(complete, layout.layer_index), layout)
    return complete


def _complete(name: str, options: Any, layouts: list[HeadLayout]) -> Settings:
    if name not in RULES:
        error = unknown("mixers", "mechanism", name, list(RULES))
        raise ValueError(f"{error}. For a mechanism that this code does not hold, install the newest crosshead")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise refuse(f"mixers.{name}", options, "use a mapping of option to value")
    known = {**RULES[name].options, LAYERS: Layers()}
    for option in options:
        if option not in known:
            raise unknown(f"mixers.{name}", "option", option, list(known))
    parsed = {  # without options that are absent and have no default
        option: value
        for option, kind in known.items()
        if (value := kind.parse(f"mixers.{name}.{option}", options.get(option), len(layouts))) is not None
    }
    return RULES[name].complete(parsed)


def layer_settings(mixers: Mapping[str, Settings], layer: int) -> dict[str, Settings]:
    """Return the mechanisms of one layer with complete options, per-layer counts resolved, in the config's order."""
    return {
        name: {
            option: RULES[name].options[option].at(value, layer)
            for option, value in options.items()
            if option != LAYERS
        }
        for name, options in mixers.items()
        if layer in options.get(LAYERS, [layer])
    }


def shared_layout(settings: Mapping[str, Settings], layout: HeadLayout) -> HeadLayout:
    """Return the layout that all mechanisms of one layer read: unset sizes filled in, changed by each mechanism."""
    value_dim = layout.value_dim or layout.head_dim
    layout = replace(
        layout,
        value_dim=value_dim,
        output_dim=value_dim,
        output_heads=layout.query_heads,
        key_components=layout.key_value_heads,
        value_components=layout.key_value_heads,
    )
    for name, options in settings.items():
        layout = RULES[name].reshape(options, layout)
    return layout


def check_layer(settings: dict[str, Settings], layout: HeadLayout) -> None:
    """Raise `ValueError` if a mechanism cannot work in this layer, alone or together with the others."""
    layout = shared_layout(settings, layout)
    if settings and layout.query_heads % max(layout.key_value_heads, 1) != 0:
        reason = f"mixers need a multiple of num_key_value_heads={layout.key_value_heads}"
        raise refuse("num_attention_heads", layout.query_heads, reason)
    replacing = [name for name in settings if RULES[name].replaces_attention]
    if len(replacing) > 1:
        names, layer = " and ".join(f"mixers.{name}" for name in replacing), layout.layer_index
        raise ValueError(f"{names} both replace attention in layer {layer}: use them in different layers")
    for name, options in settings.items():
        try:
            RULES[name].check(options, layout, settings)
        except ValueError as error:
            raise ValueError(f"{error} (layer {layout.layer_index})") from None


class MixersConfig(ConfigBase):
    """Base class of all crosshead configurations: adds `mixers` to a stock configuration."""

    class_prefix = ""  # prefix of the backbone's class names; a user's subclass keeps it
    has_key_norm = False
    auto_classes = {
        "AutoModel": "Model",
        "AutoModelForCausalLM": "ForCausalLM",
        "AutoModelForSequenceClassification": "ForSequenceClassification",
    }
    """Auto class -> suffix of the class that it loads, after `class_prefix`."""
    keys_to_ignore_at_inference = ["past_key_values", "cache", "balance_loss", "head_router_scores"]
    mixers: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        """Complete and check `mixers`, set `auto_map` and drop the `model_type` of a stock config."""
        self._check_family(kwargs.get("model_type"))
        fields = {key: value for key, value in kwargs.items() if key not in ("model_type", "auto_map")}
        super().__post_init__(**fields)
        self.auto_map = self.code_map()
        self.validate()  # the stock checks, which transformers runs for the stock class only
        self.check_mixers()

    def _check_family(self, model_type: str | None) -> None:
        allowed = (type(self).model_type.removeprefix("crosshead_"), type(self).model_type)
        if model_type not in (None, *allowed, f"crosshead_{allowed[0]}"):
            names = " or ".join(map(repr, dict.fromkeys(allowed)))
            raise refuse("model_type", model_type, f"{type(self).__name__} takes {names}")

    def code_map(self) -> dict[str, str]:
        """Return `auto_map`: Auto class -> class, all in one code file, so that loading a model imports it once."""
        names = {"AutoConfig": "Config"} | self.auto_classes
        return {auto: f"modeling_crosshead.{self.class_prefix}{ending}" for auto, ending in names.items()}

    def check_mixers(self) -> None:
        """Replace `mixers` by its complete form; raise `ValueError` if it does not fit the model."""
        self.mixers = complete_mixers({} if self.mixers is None else self.mixers, self.layouts())

    def layout_of_layer(self, layer: int) -> HeadLayout:
        """Return the head counts, head sizes and norms of one attention layer."""
        return HeadLayout(
            hidden_size=self.hidden_size,
            query_heads=self.num_attention_heads,
            key_value_heads=self.num_key_value_heads,
            head_dim=getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads,
            layer_index=layer,
            norm_eps=self.rms_norm_eps,
            key_norm_eps=self.rms_norm_eps if self.has_key_norm else None,
            dropout=self.attention_dropout or 0.0,
            is_rotary=hasattr(self, "rope_parameters"),
        )

    def layouts(self) -> list[HeadLayout]:
        """Return the layout of every layer."""
        return [self.layout_of_layer(layer) for layer in range(self.num_hidden_layers)]

    def mechanisms(self) -> dict[str, Settings]:
        """Return the mechanisms of any layer, with their options for the whole model."""
        return self.mixers or {}

    def mixers_of_layer(self, layer: int) -> dict[str, Settings]:
        """Return the mechanisms of one layer with their complete options, in the order of the config."""
        return layer_settings(self.mixers or {}, layer)

    def __init_subclass__(cls, **options: Any) -> None:
        """Remove attention from the stock tensor-parallel plan, because mechanisms work across all heads."""
        super().__init_subclass__(**options)
        if plan := getattr(cls, "base_model_tp_plan", None):  # classes without a stock base have no plan
            cls.base_model_tp_plan = {module: style for module, style in plan.items() if ".self_attn." not in module}

    def attention_plan(self) -> dict[str, str]:
        """Return attention's stock tensor-parallel plan in engines if all mechanisms split heads, else {}."""
        split = all(RULES[name].splits_heads(options) for name, options in self.mechanisms().items())
        plan = (super().base_model_tp_plan or {}) if split and self._attn_implementation in ENGINES else {}
        return {module: style for module, style in plan.items() if ".self_attn." in module}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a dictionary, also of a stock config; fields in `kwargs` override it before the checks."""
        fields = [key for key in kwargs if key in cls.__dataclass_fields__ and key != "dtype"]  # dtype may be "auto"
        # Resolve aliases: the saved field has the resolved name, is set last and would win.
        overrides = {cls.attribute_map.get(key, key): kwargs.pop(key) for key in fields}
        if "num_hidden_layers" in overrides and config_dict.get("layer_types"):
            overrides = {"layer_types": config_dict["layer_types"][: overrides["num_hidden_layers"]]} | overrides
        return super().from_dict(config_dict | overrides, **kwargs)

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return JSON with sorted keys, except in `mixers`, whose order is that of the mechanisms."""
        content = json.loads(super().to_json_string(use_diff)) | {"auto_map": self.code_map(), "mixers": self.mixers}
        return json.dumps(content, indent=2) + "\n"

    @package_only
    def __repr__(self) -> str:
        """Return the configuration as JSON, without access tokens."""
        from crosshead.common.access_tokens import without_tokens

        content, _ = without_tokens(json.loads(self.to_json_string()))
        return f"{type(self).__name__} {json.dumps(content, indent=2)}\n"

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the configuration, with copies of the two code files that load the model."""
        super().save_pretrained(save_directory)
        for name in ("configuration_crosshead.py", "modeling_crosshead.py"):
            Path(save_directory, name).write_bytes(Path(__file__).with_name(name).read_bytes())
        if push_to_hub:  # the stock method would upload before the code is written
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @package_only  # type: ignore[no-redef]  # replaces the method above: the package has no such files
    def save_pretrained(  # noqa: F811
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save the configuration, with the two code files that it needs, after another check of `mixers`."""
        from crosshead.common.access_tokens import without_tokens

        from .bundle import write_code

        self.check_mixers()
        content, dropped = without_tokens(json.loads(self.to_json_string()))
        if dropped:
            logger.warning(f"config.json is saved without {', '.join(dropped)}: access tokens, by their form")
            return type(self).from_dict(content).save_pretrained(save_directory, push_to_hub, **kwargs)
        write_code(self, save_directory)
        super().save_pretrained(save_directory)
        if push_to_hub:  # the stock method would upload only the configuration
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
