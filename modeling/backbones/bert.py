"""BERT encoder with mechanisms in its attention."""

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
    recording_forward,
    submodule_property,
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
        """Refuse BERT as a decoder or with cross-attention, then check `mixers`."""
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self, name):
                raise refuse(name, True, "crosshead has BERT as an encoder: use False")
        super().check_mixers()


class CrossheadBertAttention(CrossheadAttention, stock.BertSelfAttention):  # type: ignore[misc]  # forward takes more
    """BERT attention with mechanisms; the output projection is in `BertSelfOutput`."""

    q_proj, k_proj, v_proj = map(submodule_property, ("query", "key", "value"))
    o_proj = nn.Identity()


class CrossheadBertPreTrainedModel(CrossheadPreTrained, stock.BertPreTrainedModel):
    """Base class of the BERT models."""

    config: CrossheadBertConfig
    attention_class = CrossheadBertAttention
    _can_record_outputs = {**stock.BertPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadBertModel(CrossheadBackbone, CrossheadBertPreTrainedModel, stock.BertModel):
    """BERT encoder."""

    encoder: Any
    forward = recording_forward(stock.BertModel.forward)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        for index, layer in enumerate(self.encoder.layer):
            layout = shared_layout(self.config.mixers_of_layer(index), self.config.layout_of_layer(index))
            output, inputs = layer.attention.output, layout.output_heads * layout.output_dim
            if output.dense.in_features != inputs:
                output.dense = nn.Linear(inputs, layout.hidden_size)
            yield index, layer.attention, "self"


class CrossheadBertForMaskedLM(CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForMaskedLM):
    """BERT masked language model."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForMaskedLM.forward, CrossheadMaskedLMOutput)


@dataclass
class CrossheadBertForPreTrainingOutput(RouterOutput, stock.BertForPreTrainingOutput):
    """Output of masked language modelling and next sentence prediction, plus balance loss and router scores."""


class CrossheadBertForPreTraining(CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForPreTraining):
    """BERT pretraining model: masked language modelling and next sentence prediction."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForPreTraining.forward, CrossheadBertForPreTrainingOutput)


class CrossheadBertForSequenceClassification(
    CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForSequenceClassification
):
    """BERT sequence classifier."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForSequenceClassification.forward, CrossheadSequenceClassifierOutput)


class CrossheadBertForTokenClassification(
    CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForTokenClassification
):
    """BERT token classifier."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForTokenClassification.forward, CrossheadTokenClassifierOutput)


class CrossheadBertForQuestionAnswering(CrossheadTask, CrossheadBertPreTrainedModel, stock.BertForQuestionAnswering):
    """BERT extractive question answering model."""

    backbone_class = CrossheadBertModel
    forward = task_forward(stock.BertForQuestionAnswering.forward, CrossheadQuestionAnsweringOutput)
