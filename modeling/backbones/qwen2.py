"""Qwen2 with mechanisms in its attention."""

from typing import Any

from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from ..attention import CrossheadAttention
from ..configuration import MixersConfig
from ..model import (
    RECORDERS,
    CrossheadBackbone,
    CrossheadCausalLM,
    CrossheadPreTrained,
    CrossheadSequenceClassification,
)


class CrossheadQwen2Config(MixersConfig, Qwen2Config):
    """`Qwen2Config` plus `mixers`."""

    model_type = "crosshead_qwen2"
    class_prefix = "CrossheadQwen2"
    mixers: dict[str, Any] | None = None


class CrossheadQwen2Attention(CrossheadAttention, Qwen2Attention):  # type: ignore[misc]  # forward takes more
    """Qwen2Attention with mechanisms."""


class CrossheadQwen2PreTrainedModel(CrossheadPreTrained, Qwen2PreTrainedModel):
    """The common part of the Qwen2 classes."""

    config: CrossheadQwen2Config
    attention_class = CrossheadQwen2Attention
    _can_record_outputs = {**Qwen2PreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadQwen2Model(CrossheadBackbone, CrossheadQwen2PreTrainedModel, Qwen2Model):
    """Qwen2Model with mechanisms."""


class CrossheadQwen2ForCausalLM(CrossheadCausalLM, CrossheadQwen2PreTrainedModel, Qwen2ForCausalLM):
    """Qwen2ForCausalLM with mechanisms."""

    backbone_class = CrossheadQwen2Model


class CrossheadQwen2ForSequenceClassification(
    CrossheadSequenceClassification, CrossheadQwen2PreTrainedModel, Qwen2ForSequenceClassification
):
    """Qwen2ForSequenceClassification with mechanisms."""

    backbone_class = CrossheadQwen2Model
