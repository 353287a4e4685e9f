"""Makes the Auto classes of transformers know ours."""

from typing import Any

import transformers


def register(config: type[Any], models: tuple[type[Any], ...]) -> None:
    """Register one backbone; its configuration saves the code, not the library's `register_for_auto_class`."""
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_class, model in zip(config.auto_classes, models, strict=True):
        getattr(transformers, auto_class).register(config, model, exist_ok=True)
