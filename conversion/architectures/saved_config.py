"""Validated configs of saved models, including crosshead models without a stock model in transformers."""

from collections.abc import Mapping
from typing import Any

import torch

from crosshead.common.errors import ConversionError, one_line
from crosshead.modeling import BACKBONES

from .config_fields import check_fields
from .families import FAMILIES, PREFIX, auto_class, kind_of, read_config


def config_class_of(content: Mapping[str, Any], name: str) -> Any:
    """Return the crosshead config class for a stock or crosshead `model_type`."""
    classes = {config.model_type.removeprefix(PREFIX): config for config in BACKBONES}
    model_type = content.get("model_type")
    config_class = classes.get(str(model_type).removeprefix(PREFIX))
    if config_class is None:
        raise ConversionError(f"{name} has model_type={model_type!r}: use a model of type {', '.join(classes)}")
    return config_class


def saved_config(content: dict[str, Any], name: str) -> Any:
    """Return the validated config of a saved model, stock or crosshead."""
    config_class = config_class_of(content, name)
    if config_class.model_type.removeprefix(PREFIX) in FAMILIES:
        return read_config(content, kind_of(content), name)
    numbers = {field: value for field, value in content.items() if not isinstance(value, list)}  # skip per-stage lists
    check_fields(numbers, config_class, f"config.json of {name}")
    try:
        config = config_class.from_dict({"mixers": {}} | content)
        with torch.device("meta"):
            _model_class(config)(config)  # some values are checked only when a model is created
        return config
    except Exception as error:  # a config may contain anything, and transformers raises many types of errors
        raise ConversionError(f"config.json of {name} cannot be used: {one_line(error)}") from error


def saved_auto_class(config: Any) -> str:
    """Return the name of the Auto class that loads a saved model."""
    if config.model_type.removeprefix(PREFIX) in FAMILIES:
        return auto_class(config)
    ending = _model_class(config).__name__.removeprefix(config.class_prefix)
    return next(auto for auto, class_ending in config.auto_classes.items() if class_ending == ending)


def _model_class(config: Any) -> Any:
    """Return the model class that a config's `architectures` names, or else the first class for its config type."""
    classes = {model_class.__name__: model_class for model_class in BACKBONES[type(config)]}
    return classes.get((config.architectures or [""])[0]) or next(iter(classes.values()))
