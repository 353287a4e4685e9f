"""ALBERT with mechanisms in its attention, whose weights all layers share."""

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
    alias,
    recording_forward,
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
        """No option may differ between layers that share their weights."""
        super().check_mixers()
        for name, options in (self.mixers or {}).items():
            for option, value in reversed(options.items()):  # those that follow from others come first
                counts = isinstance(RULES[name].options.get(option), Count)
                if option == LAYERS or (counts and isinstance(value, list)):
                    reason = "the layers share their weights: use one value for all"
                    raise refuse(f"mixers.{name}.{option}", value, reason)

    def layouts(self) -> list[HeadLayout]:
        """The shape of each layer: the first, in every one."""
        return [self.layout_of_layer(0)] * (self.num_hidden_layers * self.inner_group_num)


class CrossheadAlbertAttention(EncoderAttention, IndexedAttention, stock.AlbertAttention):
    """Its attention, with the dropout and the norm that follow it."""

    q_proj, k_proj, v_proj, o_proj = map(alias, ("query", "key", "value", "dense"))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Normed outputs (B, T, hidden), and the attention weights where the implementation returns them."""
        output, weights = super().forward(hidden_states, attention_mask, **kwargs)
        return self.LayerNorm(hidden_states + self.output_dropout(output)), weights


class CrossheadAlbertPreTrainedModel(CrossheadPreTrained, stock.AlbertPreTrainedModel):
    """The common part of its models."""

    config: CrossheadAlbertConfig
    attention_class = CrossheadAlbertAttention
    _can_record_outputs = {**stock.AlbertPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadAlbertModel(CrossheadBackbone, CrossheadAlbertPreTrainedModel, stock.AlbertModel):
    """Its encoder."""

    encoder: Any
    config: CrossheadAlbertConfig
    forward = recording_forward(stock.AlbertModel.forward)

    def _attention_places(self) -> Iterator[tuple[int, nn.Module, str]]:
        for group in self.encoder.albert_layer_groups:
            for layer in group.albert_layers:
                yield 0, layer, "attention"


class CrossheadAlbertForMaskedLM(CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForMaskedLM):
    """Its masked language model."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForMaskedLM.forward, CrossheadMaskedLMOutput)


@dataclass
class CrossheadAlbertForPreTrainingOutput(RouterOutput, stock.AlbertForPreTrainingOutput):
    """The output for masked tokens and the order of sentences, and what the head routers did."""


class CrossheadAlbertForPreTraining(CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForPreTraining):
    """Its model for pretraining: a masked language model with a second head."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForPreTraining.forward, CrossheadAlbertForPreTrainingOutput)


class CrossheadAlbertForSequenceClassification(
    CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForSequenceClassification
):
    """Its sequence classifier."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForSequenceClassification.forward, CrossheadSequenceClassifierOutput)


class CrossheadAlbertForTokenClassification(
    CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForTokenClassification
):
    """Its token classifier."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForTokenClassification.forward, CrossheadTokenClassifierOutput)


class CrossheadAlbertForQuestionAnswering(
    CrossheadTask, CrossheadAlbertPreTrainedModel, stock.AlbertForQuestionAnswering
):
    """Its model for answers that are spans of a text."""

    backbone_class = CrossheadAlbertModel
    forward = task_forward(stock.AlbertForQuestionAnswering.forward, CrossheadQuestionAnsweringOutput)
