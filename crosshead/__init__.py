"""Attention heads that work together, for Llama- and Qwen-family models.

Importing crosshead registers its configurations and models with the Auto classes of transformers.
"""

from importlib.metadata import version

from crosshead.conversion.convert import convert
from crosshead.conversion.fold import fold
from crosshead.conversion.verification.verify import verify
from crosshead.modeling import BACKBONES, MECHANISMS
from crosshead.modeling.backbones.llama import (
    CrossheadLlamaConfig,
    CrossheadLlamaForCausalLM,
    CrossheadLlamaForSequenceClassification,
    CrossheadLlamaModel,
)
from crosshead.modeling.backbones.qwen2 import (
    CrossheadQwen2Config,
    CrossheadQwen2ForCausalLM,
    CrossheadQwen2ForSequenceClassification,
    CrossheadQwen2Model,
)
from crosshead.modeling.backbones.qwen3 import (
    CrossheadQwen3Config,
    CrossheadQwen3ForCausalLM,
    CrossheadQwen3ForSequenceClassification,
    CrossheadQwen3Model,
)
from crosshead.modeling.backbones.qwen3_moe import (
    CrossheadQwen3MoeConfig,
    CrossheadQwen3MoeForCausalLM,
    CrossheadQwen3MoeForSequenceClassification,
    CrossheadQwen3MoeModel,
)
from crosshead.modeling.kernels import register_kernels
from crosshead.registration import register

__version__ = version("crosshead")

FAMILIES = BACKBONES
"""Each configuration -> its backbone, language model and sequence classifier."""

register_kernels()
for _config, _models in FAMILIES.items():
    register(_config, *_models)

__all__ = [
    "FAMILIES",
    "MECHANISMS",
    "CrossheadLlamaConfig",
    "CrossheadLlamaForCausalLM",
    "CrossheadLlamaForSequenceClassification",
    "CrossheadLlamaModel",
    "CrossheadQwen2Config",
    "CrossheadQwen2ForCausalLM",
    "CrossheadQwen2ForSequenceClassification",
    "CrossheadQwen2Model",
    "CrossheadQwen3Config",
    "CrossheadQwen3ForCausalLM",
    "CrossheadQwen3ForSequenceClassification",
    "CrossheadQwen3Model",
    "CrossheadQwen3MoeConfig",
    "CrossheadQwen3MoeForCausalLM",
    "CrossheadQwen3MoeForSequenceClassification",
    "CrossheadQwen3MoeModel",
    "__version__",
    "convert",
    "fold",
    "verify",
]
