"""Llama with mechanisms in its attention."""

from typing import Any

import transformers.models.llama.modeling_llama as stock
from transformers import LlamaConfig

from ..attention import CrossheadAttention
from ..configuration import MixersConfig
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained

__all__ = [
    "CrossheadLlamaConfig",
    "CrossheadLlamaForCausalLM",
    "CrossheadLlamaForSequenceClassification",
    "CrossheadLlamaModel",
]


class CrossheadLlamaConfig(MixersConfig, LlamaConfig):
    """`LlamaConfig` plus `mixers`."""

    model_type = "crosshead_llama"
    class_prefix = "CrossheadLlama"
    mixers: dict[str, Any] | None = None


class CrossheadLlamaAttention(CrossheadAttention, stock.LlamaAttention):  # type: ignore[misc]  # forward takes more
    """Llama attention with mechanisms."""


class CrossheadLlamaPreTrainedModel(CrossheadPreTrained, stock.LlamaPreTrainedModel):
    """Base class of the Llama models."""

    config: CrossheadLlamaConfig
    attention_class = CrossheadLlamaAttention
    _can_record_outputs = {**stock.LlamaPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadLlamaModel(CrossheadBackbone, CrossheadLlamaPreTrainedModel, stock.LlamaModel):
    """Llama decoder."""


class CrossheadLlamaForCausalLM(CrossheadCausalLM, CrossheadLlamaPreTrainedModel, stock.LlamaForCausalLM):
    """Llama causal language model."""

    backbone_class = CrossheadLlamaModel


class CrossheadLlamaForSequenceClassification(
    CrossheadClassifier, CrossheadLlamaPreTrainedModel, stock.LlamaForSequenceClassification
):
    """Llama sequence classifier."""

    backbone_class = CrossheadLlamaModel
