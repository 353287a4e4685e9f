"""Mechanisms, configurations and model classes."""

from typing import Any

from . import backbones
from .configuration import MixersConfig
from .mechanisms import MECHANISMS


def _models(config: Any) -> tuple[type, ...]:
    return tuple(getattr(backbones, f"{config.class_prefix}{ending}") for ending in config.auto_classes.values())


BACKBONES: dict[type[MixersConfig], tuple[type, ...]] = {
    config: _models(config) for config in (item for name, item in vars(backbones).items() if name.endswith("Config"))
}
"""Configuration class -> its model classes, in the order of its `auto_classes`: the backbone, then task heads."""

__all__ = ["BACKBONES", "MECHANISMS"]
