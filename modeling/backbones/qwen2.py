"""Qwen2 with mechanisms in its attention."""

from typing import Any

import transformers.models.qwen2.modeling_qwen2 as stock
from transformers import Qwen2Config

from ..attention import CrossheadAttention
from ..configuration import MixersConfig
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained

__all__ = [
    "CrossheadQwen2Config",
    "CrossheadQwen2ForCausalLM",
    "CrossheadQwen2ForSequenceClassification",
    "CrossheadQwen2Model",
]


class CrossheadQwen2Config(MixersConfig, Qwen2Config):
    """`Qwen2Config` plus `mixers`."""

    model_type = "crosshead_qwen2"
    class_prefix = "CrossheadQwen2"
    mixers: dict[str, Any] | None = None


class CrossheadQwen2Attention(CrossheadAttention, stock.Qwen2Attention):
    """Qwen2 attention with mechanisms."""


class CrossheadQwen2PreTrainedModel(CrossheadPreTrained, stock.Qwen2PreTrainedModel):
    """Base class of the Qwen2 models."""

    config: CrossheadQwen2Config
    attention_class = CrossheadQwen2Attention
    _can_record_outputs = {**stock.Qwen2PreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadQwen2Model(CrossheadBackbone, CrossheadQwen2PreTrainedModel, stock.Qwen2Model):
    """Qwen2 decoder."""


class CrossheadQwen2ForCausalLM(CrossheadCausalLM, CrossheadQwen2PreTrainedModel, stock.Qwen2ForCausalLM):
    """Qwen2 causal language model."""

    backbone_class = CrossheadQwen2Model


class CrossheadQwen2ForSequenceClassification(
    CrossheadClassifier, CrossheadQwen2PreTrainedModel, stock.Qwen2ForSequenceClassification
):
    """Qwen2 sequence classifier."""

    backbone_class = CrossheadQwen2Model
