"""DeiT with mechanisms in its attention."""

from collections.abc import Iterator
from typing import Any

import transformers.models.deit.modeling_deit as stock
from torch import nn
from transformers import DeiTConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from ..configuration import MixersConfig
from ..encoder import (
    ENCODER_FIELDS,
    IMAGE_CLASSES,
    CrossheadImageClassifierOutput,
    CrossheadTask,
    EncoderAttention,
    IndexedAttention,
    recording_forward,
    task_forward,
)
from ..model import RECORDERS, CrossheadBackbone, CrossheadPreTrained

__all__ = ["CrossheadDeiTConfig", "CrossheadDeiTForImageClassification", "CrossheadDeiTModel"]


class CrossheadDeiTConfig(MixersConfig, DeiTConfig):
    """`DeiTConfig` plus `mixers`."""

    model_type = "crosshead_deit"
    class_prefix = "CrossheadDeiT"
    auto_classes = IMAGE_CLASSES
    attribute_map = ENCODER_FIELDS
    mixers: dict[str, Any] | None = None


class CrossheadDeiTAttention(EncoderAttention, IndexedAttention, stock.DeiTAttention):  # type: ignore[misc]
    """DeiT attention with mechanisms."""


class CrossheadDeiTPreTrainedModel(CrossheadPreTrained, stock.DeiTPreTrainedModel):
    """Base class of the DeiT models."""

    config: CrossheadDeiTConfig
    attention_class = CrossheadDeiTAttention
    _can_record_outputs = {**stock.DeiTPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadDeiTModel(CrossheadBackbone, CrossheadDeiTPreTrainedModel, stock.DeiTModel):
    """DeiT encoder."""

    forward = recording_forward(stock.DeiTModel.forward)

    def __init__(
        self, config: CrossheadDeiTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False
    ) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer, use_mask_token=use_mask_token)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        return ((index, layer, "attention") for index, layer in enumerate(self.layers))


class CrossheadDeiTForImageClassification(
    CrossheadTask, CrossheadDeiTPreTrainedModel, stock.DeiTForImageClassification
):
    """DeiT image classifier."""

    backbone_class = CrossheadDeiTModel
    forward = task_forward(stock.DeiTForImageClassification.forward, CrossheadImageClassifierOutput)


# Checkpoints use the tensor names of older transformers releases, which renames them for the stock class only.
register_checkpoint_conversion_mapping(
    "CrossheadDeiTModel", get_checkpoint_conversion_mapping("DeiTModel") or [], overwrite=True
)
