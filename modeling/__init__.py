"""The mechanisms, configurations and model classes."""

from typing import Any

from .backbones import llama, qwen2, qwen3, qwen3_moe
from .configuration import AUTO_CLASSES, MixersConfig
from .mechanisms import MECHANISMS

_MODULES = {"Llama": llama, "Qwen2": qwen2, "Qwen3": qwen3, "Qwen3Moe": qwen3_moe}


def _classes(name: str, module: Any) -> tuple[Any, Any]:
    models = (getattr(module, f"Crosshead{name}{ending}") for ending in AUTO_CLASSES.values())
    return getattr(module, f"Crosshead{name}Config"), tuple(models)


BACKBONES: dict[type[MixersConfig], tuple[type, type, type]] = dict(_classes(*each) for each in _MODULES.items())
"""Each configuration -> its backbone, language model and sequence classifier."""

__all__ = ["BACKBONES", "MECHANISMS"]
