"""BERT with mechanisms in its attention, as an encoder."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers.models.bert.modeling_bert as stock
from torch import nn
from transformers import BertConfig

from ..attention import CrossheadAttention
from ..configuration import MixersConfig, shared_layout
from ..encoder import (
    ENCODER_CLASSES,
    ENCODER_FIELDS,
    CrossheadMaskedLMOutput,
    CrossheadQuestionAnsweringOutput,
    CrossheadSequenceClassifierOutput,
    CrossheadTask,
    CrossheadTokenClassifierOutput,
    RouterOutput,
    alias,
    recording_forward,
    task_forward,
)
from ..model import RECORDERS, CrossheadBackbone, CrossheadPreTrained
from ..options import refuse

__all__ = [
    "CrossheadBertConfig",
    "CrossheadBertForMaskedLM",
    "CrossheadBertForPreTraining",
    "CrossheadBertForQuestionAnswering",
    "CrossheadBertForSequenceClassification",
    "CrossheadBertForTokenClassification",
    "CrossheadBertModel",
]


class CrossheadBertConfig(MixersConfig, BertConfig):
    """`BertConfig` plus `mixers`."""

    model_type = "crosshead_bert"
    class_prefix = "CrossheadBert"
    auto_classes = ENCODER_CLASSES
    attribute_map = ENCODER_FIELDS
    mixers: dict[str, Any] | None = None

    def check_mixers(self) -> None:
        """Mechanisms work in encoders alone."""
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self, name):
                raise refuse(name, True, "crosshead has BERT as an encoder: use False")
        super().check_mixers()


class CrossheadBertAttention(CrossheadAttention, stock.BertSelfAttention):  # type: ignore[misc]  # forward takes more
    """Its attention, without the output projection, which is that of `BertSelfOutput`."""

    q_proj, k_proj, v_proj = map(alias, ("query", "key", "value"))
    o_proj = nn.Identity()


class CrossheadBertPreTrainedModel(CrossheadPreTrained, stock.BertPreTrainedModel):
    """The common part of its models."""

    config: CrossheadBertConfig
    attention_class = CrossheadBertAttention
    _can_record_outputs = {**stock.BertPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadBertModel(CrossheadBackbone, CrossheadBertPreTrainedModel, stock.BertModel):
    """Its encoder."""

    encoder: Any
    forward = recording_forward(stock.BertModel.forward)

    def _attention_places(self) -> Iterator[tuple[int, nn.Module, str]]:
        for index, layer in enumerate(self.encoder.layer):
            layout = shared_layout(self.config.mixers_of_layer(index), self.config.layout_of_layer(index))
            output, inputs = layer.attention.output, layout.output_heads * layout.output_dim
            if output.dense.in_features != inputs:
                output.dense = nn.Linear(inputs, layout.hidden_size)
            yield index, layer.attention, "self"


class CrossheadBertForMaskedLM(CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForMaskedLM):
    """Its masked language model."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForMaskedLM.forward, CrossheadMaskedLMOutput)


@dataclass
class CrossheadBertForPreTrainingOutput(RouterOutput, stock.BertForPreTrainingOutput):
    """The output for masked tokens and the next sentence, and what the head routers did."""


class CrossheadBertForPreTraining(CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForPreTraining):
    """Its model for pretraining: a masked language model with a second head."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForPreTraining.forward, CrossheadBertForPreTrainingOutput)


class CrossheadBertForSequenceClassification(
    CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForSequenceClassification
):
    """Its sequence classifier."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForSequenceClassification.forward, CrossheadSequenceClassifierOutput)


class CrossheadBertForTokenClassification(
    CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForTokenClassification
):
    """Its token classifier."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForTokenClassification.forward, CrossheadTokenClassifierOutput)


class CrossheadBertForQuestionAnswering(CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForQuestionAnswering):
    """Its model for answers that are spans of a text."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForQuestionAnswering.forward, CrossheadQuestionAnsweringOutput)
