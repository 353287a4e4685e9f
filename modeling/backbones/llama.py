"""Llama with mechanisms in its attention."""

from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
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


class CrossheadLlamaConfig(MixersConfig, LlamaConfig):
    """`LlamaConfig` plus `mixers`."""

    model_type = "crosshead_llama"
    class_prefix = "CrossheadLlama"
    mixers: dict[str, Any] | None = None


class CrossheadLlamaAttention(CrossheadAttention, LlamaAttention):  # type: ignore[misc]  # forward takes more
    """LlamaAttention with mechanisms."""


class CrossheadLlamaPreTrainedModel(CrossheadPreTrained, LlamaPreTrainedModel):
    """The common part of the Llama classes."""

    config: CrossheadLlamaConfig
    attention_class = CrossheadLlamaAttention
    _can_record_outputs = {**LlamaPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadLlamaModel(CrossheadBackbone, CrossheadLlamaPreTrainedModel, LlamaModel):
    """LlamaModel with mechanisms."""


class CrossheadLlamaForCausalLM(CrossheadCausalLM, CrossheadLlamaPreTrainedModel, LlamaForCausalLM):
    """LlamaForCausalLM with mechanisms."""

    backbone_class = CrossheadLlamaModel


class CrossheadLlamaForSequenceClassification(
    CrossheadSequenceClassification, CrossheadLlamaPreTrainedModel, LlamaForSequenceClassification
):
    """LlamaForSequenceClassification with mechanisms."""

    backbone_class = CrossheadLlamaModel
