"""ALBERT with mechanisms in its attention; all layers share their weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers.models.albert.modeling_albert as stock
from torch import Tensor, nn
from transformers import AlbertConfig

from ..configuration import LAYERS, MixersConfig
from ..encoder import (
    ENCODER_CLASSES,
    ENCODER_FIELDS,
    CrossheadMaskedLMOutput,
    CrossheadQuestionAnsweringOutput,
    CrossheadSequenceClassifierOutput,
    CrossheadTask,
    CrossheadTokenClassifierOutput,
    EncoderAttention,
    IndexedAttention,
    RouterOutput,
    recording_forward,
    submodule_property,
    task_forward,
)
from ..mechanisms import RULES
from ..mechanisms.base import HeadLayout
from ..model import RECORDERS, CrossheadBackbone, CrossheadPreTrained
from ..options import Count, refuse

__all__ = [
    "CrossheadAlbertConfig",
    "CrossheadAlbertForMaskedLM",
    "CrossheadAlbertForPreTraining",
    "CrossheadAlbertForQuestionAnswering",
    "CrossheadAlbertForSequenceClassification",
    "CrossheadAlbertForTokenClassification",
    "CrossheadAlbertModel",
]


class CrossheadAlbertConfig(MixersConfig, AlbertConfig):
    """`AlbertConfig` plus `mixers`."""

    model_type = "crosshead_albert"
    class_prefix = "CrossheadAlbert"
    auto_classes = ENCODER_CLASSES
    attribute_map = ENCODER_FIELDS
    mixers: dict[str, Any] | None = None

    def check_mixers(self) -> None:
        """Refuse options that differ between layers, because the layers share their weights."""
        super().check_mixers()
        for name, options in (self.mixers or {}).items():
            for option, value in reversed(options.items()):  # derived options come first
                counts = isinstance(RULES[name].options.get(option), Count)
                if option == LAYERS or (counts and isinstance(value, list)):
                    reason = "the layers share their weights: use one value for all"
                    raise refuse(f"mixers.{name}.{option}", value, reason)

    def layouts(self) -> list[HeadLayout]:
        """Return the head layout of each layer; all are that of the first layer."""
        return [self.layout_of_layer(0)] * (self.num_hidden_layers * self.inner_group_num)


class CrossheadAlbertAttention(EncoderAttention, IndexedAttention, stock.AlbertAttention):
    """ALBERT attention with mechanisms, followed by dropout, residual and LayerNorm as in the stock class."""

    q_proj, k_proj, v_proj, o_proj = map(submodule_property, ("query", "key", "value", "dense"))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs (B, T, hidden) after residual and LayerNorm, and the attention weights if available."""
        output, weights = super().forward(hidden_states, attention_mask, **kwargs)
        return self.LayerNorm(hidden_states + self.output_dropout(output)), weights


class CrossheadAlbertPreTrainedModel(CrossheadPreTrained, stock.AlbertPreTrainedModel):
    """Base class of the ALBERT models."""

    config: CrossheadAlbertConfig
    attention_class = CrossheadAlbertAttention
    _can_record_outputs = {**stock.AlbertPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadAlbertModel(CrossheadBackbone, CrossheadAlbertPreTrainedModel, stock.AlbertModel):
    """ALBERT encoder."""

    encoder: Any
    config: CrossheadAlbertConfig
    forward = recording_forward(stock.AlbertModel.forward)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        for group in self.encoder.albert_layer_groups:
            for layer in group.albert_layers:
                yield 0, layer, "attention"


class CrossheadAlbertForMaskedLM(CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForMaskedLM):
    """ALBERT masked language model."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForMaskedLM.forward, CrossheadMaskedLMOutput)


@dataclass
class CrossheadAlbertForPreTrainingOutput(RouterOutput, stock.AlbertForPreTrainingOutput):
    """Output of masked language modelling and sentence order prediction, plus balance loss and router scores."""


class CrossheadAlbertForPreTraining(CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForPreTraining):
    """ALBERT pretraining model: masked language modelling and sentence order prediction."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForPreTraining.forward, CrossheadAlbertForPreTrainingOutput)


class CrossheadAlbertForSequenceClassification(
    CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForSequenceClassification
):
    """ALBERT sequence classifier."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForSequenceClassification.forward, CrossheadSequenceClassifierOutput)


class CrossheadAlbertForTokenClassification(
    CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForTokenClassification
):
    """ALBERT token classifier."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForTokenClassification.forward, CrossheadTokenClassifierOutput)


class CrossheadAlbertForQuestionAnswering(
    CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForQuestionAnswering
):
    """ALBERT extractive question answering model."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForQuestionAnswering.forward, CrossheadQuestionAnsweringOutput)
