"""The mechanisms, configurations and model classes."""

from .backbones.llama import (
    CrossheadLlamaConfig,
    CrossheadLlamaForCausalLM,
    CrossheadLlamaForSequenceClassification,
    CrossheadLlamaModel,
)
from .backbones.qwen2 import (
    CrossheadQwen2Config,
    CrossheadQwen2ForCausalLM,
    CrossheadQwen2ForSequenceClassification,
    CrossheadQwen2Model,
)
from .backbones.qwen3 import (
    CrossheadQwen3Config,
    CrossheadQwen3ForCausalLM,
    CrossheadQwen3ForSequenceClassification,
    CrossheadQwen3Model,
)
from .backbones.qwen3_moe import (
    CrossheadQwen3MoeConfig,
    CrossheadQwen3MoeForCausalLM,
    CrossheadQwen3MoeForSequenceClassification,
    CrossheadQwen3MoeModel,
)
from .configuration import MixersConfig
from .mechanisms import MECHANISMS

BACKBONES: dict[type[MixersConfig], tuple[type, type, type]] = {
    CrossheadLlamaConfig: (CrossheadLlamaModel, CrossheadLlamaForCausalLM, CrossheadLlamaForSequenceClassification),
    CrossheadQwen2Config: (CrossheadQwen2Model, CrossheadQwen2ForCausalLM, CrossheadQwen2ForSequenceClassification),
    CrossheadQwen3Config: (CrossheadQwen3Model, CrossheadQwen3ForCausalLM, CrossheadQwen3ForSequenceClassification),
    CrossheadQwen3MoeConfig: (
        CrossheadQwen3MoeModel,
        CrossheadQwen3MoeForCausalLM,
        CrossheadQwen3MoeForSequenceClassification,
    ),
}
"""Each configuration -> its backbone, language model and sequence classifier."""

__all__ = [
    "BACKBONES",
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
]
