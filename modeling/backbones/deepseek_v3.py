"""DeepSeek-V3 with mechanisms in its attention."""

from typing import Any

import transformers.models.deepseek_v3.modeling_deepseek_v3 as stock
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from ..latent import LatentAttention, LatentConfig
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained

# Stock checkpoints store each expert separately; the model holds them fused.
register_checkpoint_conversion_mapping(
    "crosshead_deepseek_v3", get_checkpoint_conversion_mapping("deepseek_v3"), overwrite=True
)

__all__ = [
    "CrossheadDeepseekV3Config",
    "CrossheadDeepseekV3ForCausalLM",
    "CrossheadDeepseekV3ForSequenceClassification",
    "CrossheadDeepseekV3Model",
]


class CrossheadDeepseekV3Config(LatentConfig, DeepseekV3Config):
    """`DeepseekV3Config` plus `mixers`."""

    model_type = "crosshead_deepseek_v3"
    class_prefix = "CrossheadDeepseekV3"
    mixers: dict[str, Any] | None = None


class CrossheadDeepseekV3Attention(LatentAttention, stock.DeepseekV3Attention):  # type: ignore[misc]
    """DeepSeek-V3 attention with mechanisms."""

    def apply_rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate pairs of adjacent features if `config.rope_interleave`, else the two halves of the features."""
        interleaved = self.config.rope_interleave
        rotate = stock.apply_rotary_pos_emb_interleave if interleaved else stock.apply_rotary_pos_emb
        rotated: tuple[Tensor, Tensor] = rotate(query, key, cos, sin)
        return rotated


class CrossheadDeepseekV3PreTrainedModel(CrossheadPreTrained, stock.DeepseekV3PreTrainedModel):
    """Base class of the DeepSeek-V3 models."""

    config: CrossheadDeepseekV3Config
    attention_class = CrossheadDeepseekV3Attention
    _can_record_outputs = {**stock.DeepseekV3PreTrainedModel._can_record_outputs, **RECORDERS}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in the class's source file; the experts are the stock ones.
        return stock.DeepseekV3PreTrainedModel._can_set_experts_implementation()


class CrossheadDeepseekV3Model(CrossheadBackbone, CrossheadDeepseekV3PreTrainedModel, stock.DeepseekV3Model):
    """DeepSeek-V3 decoder."""


class CrossheadDeepseekV3ForCausalLM(
    CrossheadCausalLM, CrossheadDeepseekV3PreTrainedModel, stock.DeepseekV3ForCausalLM
):
    """DeepSeek-V3 causal language model."""

    backbone_class = CrossheadDeepseekV3Model


class CrossheadDeepseekV3ForSequenceClassification(
    CrossheadClassifier, CrossheadDeepseekV3PreTrainedModel, stock.DeepseekV3ForSequenceClassification
):
    """DeepSeek-V3 sequence classifier."""

    backbone_class = CrossheadDeepseekV3Model
