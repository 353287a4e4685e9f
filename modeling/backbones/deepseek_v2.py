"""DeepSeek-V2 with mechanisms in its attention."""

from typing import Any

import torch
import transformers.models.deepseek_v2.modeling_deepseek_v2 as stock
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from ..latent import LatentAttention, LatentConfig
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained
from ..ops import widened

# Stock checkpoints store each expert separately; the model holds them fused.
register_checkpoint_conversion_mapping(
    "crosshead_deepseek_v2", get_checkpoint_conversion_mapping("deepseek_v2"), overwrite=True
)

__all__ = [
    "CrossheadDeepseekV2Config",
    "CrossheadDeepseekV2ForCausalLM",
    "CrossheadDeepseekV2ForSequenceClassification",
    "CrossheadDeepseekV2Model",
]


class CrossheadDeepseekV2Config(LatentConfig, DeepseekV2Config):
    """`DeepseekV2Config` plus `mixers`."""

    model_type = "crosshead_deepseek_v2"
    class_prefix = "CrossheadDeepseekV2"
    mixers: dict[str, Any] | None = None


class CrossheadDeepseekV2Attention(LatentAttention, stock.DeepseekV2Attention):  # type: ignore[misc]
    """DeepSeek-V2 attention with mechanisms."""

    def apply_rotary(self, query: Tensor, key: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate adjacent features by complex `frequencies` (B, T, features / 2); like stock, but keeps float64."""

        def rotated(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.to(widened(x.dtype)).reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * frequencies.unsqueeze(1).to(pairs.device)).flatten(3).type_as(x)

        return rotated(query), rotated(key)


class CrossheadDeepseekV2PreTrainedModel(CrossheadPreTrained, stock.DeepseekV2PreTrainedModel):
    """Base class of the DeepSeek-V2 models."""

    config: CrossheadDeepseekV2Config
    attention_class = CrossheadDeepseekV2Attention
    _can_record_outputs = {**stock.DeepseekV2PreTrainedModel._can_record_outputs, **RECORDERS}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in the class's source file; the experts are the stock ones.
        return stock.DeepseekV2PreTrainedModel._can_set_experts_implementation()


class CrossheadDeepseekV2Model(CrossheadBackbone, CrossheadDeepseekV2PreTrainedModel, stock.DeepseekV2Model):
    """DeepSeek-V2 decoder."""


class CrossheadDeepseekV2ForCausalLM(
    CrossheadCausalLM, CrossheadDeepseekV2PreTrainedModel, stock.DeepseekV2ForCausalLM
):
    """DeepSeek-V2 causal language model."""

    backbone_class = CrossheadDeepseekV2Model


class CrossheadDeepseekV2ForSequenceClassification(
    CrossheadClassifier, CrossheadDeepseekV2PreTrainedModel, stock.DeepseekV2ForSequenceClassification
):
    """DeepSeek-V2 sequence classifier."""

    backbone_class = CrossheadDeepseekV2Model
