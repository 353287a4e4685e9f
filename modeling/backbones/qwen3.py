"""Qwen3 with mechanisms in its attention."""

from typing import Any

from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3PreTrainedModel,
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


class CrossheadQwen3Config(MixersConfig, Qwen3Config):
    """`Qwen3Config` plus `mixers`."""

    model_type = "crosshead_qwen3"
    class_prefix = "CrossheadQwen3"
    has_key_norm = True
    mixers: dict[str, Any] | None = None


class CrossheadQwen3Attention(CrossheadAttention, Qwen3Attention):  # type: ignore[misc]  # forward takes more
    """Qwen3Attention with mechanisms."""


class CrossheadQwen3PreTrainedModel(CrossheadPreTrained, Qwen3PreTrainedModel):
    """The common part of the Qwen3 classes."""

    config: CrossheadQwen3Config
    attention_class = CrossheadQwen3Attention
    _can_record_outputs = {**Qwen3PreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadQwen3Model(CrossheadBackbone, CrossheadQwen3PreTrainedModel, Qwen3Model):
    """Qwen3Model with mechanisms."""


class CrossheadQwen3ForCausalLM(CrossheadCausalLM, CrossheadQwen3PreTrainedModel, Qwen3ForCausalLM):
    """Qwen3ForCausalLM with mechanisms."""

    backbone_class = CrossheadQwen3Model


class CrossheadQwen3ForSequenceClassification(
    CrossheadSequenceClassification, CrossheadQwen3PreTrainedModel, Qwen3ForSequenceClassification
):
    """Qwen3ForSequenceClassification with mechanisms."""

    backbone_class = CrossheadQwen3Model
