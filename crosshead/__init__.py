"""Attention heads that work together, for models of the Llama, Qwen, BERT and ViT families.

Importing crosshead registers its configurations and models with the Auto classes of transformers.
"""

from importlib.metadata import version

import transformers

from crosshead.conversion.convert import convert
from crosshead.conversion.fold import fold
from crosshead.conversion.verification.verify import verify
from crosshead.modeling import BACKBONES, MECHANISMS, backbones
from crosshead.modeling.backbones import *  # noqa: F403
from crosshead.modeling.kernels import register_kernels

__version__ = version("crosshead")

FAMILIES = BACKBONES
"""Each configuration -> its backbone, its language model, and the other task heads of its `auto_classes`."""

register_kernels()
for _config, _models in FAMILIES.items():
    transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto_class, _model in zip(_config.auto_classes, _models, strict=True):
        getattr(transformers, _auto_class).register(_config, _model, exist_ok=True)

__all__ = ["FAMILIES", "MECHANISMS", "__version__", "convert", "fold", "verify"]
__all__ += backbones.__all__
