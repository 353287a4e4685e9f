"""Qwen3 with mechanisms in its attention."""

from typing import Any

import transformers.models.qwen3.modeling_qwen3 as stock
from transformers import Qwen3Config

from ..attention import CrossheadAttention
from ..configuration import MixersConfig
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained

__all__ = [
    "CrossheadQwen3Config",
    "CrossheadQwen3ForCausalLM",
    "CrossheadQwen3ForSequenceClassification",
    "CrossheadQwen3Model",
]


class CrossheadQwen3Config(MixersConfig, Qwen3Config):
    """`Qwen3Config` plus `mixers`."""

    model_type = "crosshead_qwen3"
    class_prefix = "CrossheadQwen3"
    has_key_norm = True
    mixers: dict[str, Any] | None = None


class CrossheadQwen3Attention(CrossheadAttention, stock.Qwen3Attention):
    """Qwen3 attention with mechanisms."""


class CrossheadQwen3PreTrainedModel(CrossheadPreTrained, stock.Qwen3PreTrainedModel):
    """Base class of the Qwen3 models."""

    config: CrossheadQwen3Config
    attention_class = CrossheadQwen3Attention
    _can_record_outputs = {**stock.Qwen3PreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadQwen3Model(CrossheadBackbone, CrossheadQwen3PreTrainedModel, stock.Qwen3Model):
    """Qwen3 decoder."""


class CrossheadQwen3ForCausalLM(CrossheadCausalLM, CrossheadQwen3PreTrainedModel, stock.Qwen3ForCausalLM):
    """Qwen3 causal language model."""

    backbone_class = CrossheadQwen3Model


class CrossheadQwen3ForSequenceClassification(
    CrossheadClassifier, CrossheadQwen3PreTrainedModel, stock.Qwen3ForSequenceClassification
):
    """Qwen3 sequence classifier."""

    backbone_class = CrossheadQwen3Model
