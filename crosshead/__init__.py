"""Attention mechanisms across heads, for models of the Llama, Qwen, BERT and ViT families.

Importing crosshead registers its configurations and models with the Auto classes of transformers.
"""

from importlib.metadata import version as _version

import transformers as _transformers

from crosshead.conversion.convert import convert as convert
from crosshead.conversion.fold import fold as fold
from crosshead.conversion.verification.verify import verify as verify
from crosshead.modeling import BACKBONES as FAMILIES
from crosshead.modeling import MECHANISMS as MECHANISMS
from crosshead.modeling.backbones import *  # noqa: F403
from crosshead.modeling.kernels import register_kernels as _register_kernels

__version__ = _version("crosshead")
_register_kernels()
for _config, _models in FAMILIES.items():
    _transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto_class, _model in zip(_config.auto_classes, _models, strict=True):
        getattr(_transformers, _auto_class).register(_config, _model, exist_ok=True)

# Assigned through globals(): from a computed `__all__`, type checkers would export nothing.
globals()["__all__"] = [
    *("FAMILIES", "MECHANISMS", "__version__", "convert", "fold", "verify"),
    *(_name for _name in globals() if _name.startswith("Crosshead")),
]
