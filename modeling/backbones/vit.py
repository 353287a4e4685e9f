"""ViT with mechanisms in its attention."""

from collections.abc import Iterator
from typing import Any

import transformers.models.vit.modeling_vit as stock
from torch import nn
from transformers import ViTConfig
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

__all__ = ["CrossheadViTConfig", "CrossheadViTForImageClassification", "CrossheadViTModel"]


class CrossheadViTConfig(MixersConfig, ViTConfig):
    """`ViTConfig` plus `mixers`."""

    model_type = "crosshead_vit"
    class_prefix = "CrossheadViT"
    auto_classes = IMAGE_CLASSES
    attribute_map = ENCODER_FIELDS
    mixers: dict[str, Any] | None = None


class CrossheadViTAttention(EncoderAttention, IndexedAttention, stock.ViTAttention):  # type: ignore[misc]
    """ViT attention with mechanisms."""


class CrossheadViTPreTrainedModel(CrossheadPreTrained, stock.ViTPreTrainedModel):
    """Base class of the ViT models."""

    config: CrossheadViTConfig
    attention_class = CrossheadViTAttention
    _can_record_outputs = {**stock.ViTPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadViTModel(CrossheadBackbone, CrossheadViTPreTrainedModel, stock.ViTModel):
    """ViT encoder."""

    forward = recording_forward(stock.ViTModel.forward)

    def __init__(
        self, config: CrossheadViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False
    ) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer, use_mask_token=use_mask_token)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        return ((index, layer, "attention") for index, layer in enumerate(self.layers))


class CrossheadViTForImageClassification(CrossheadTask, CrossheadViTPreTrainedModel, stock.ViTForImageClassification):
    """ViT image classifier."""

    backbone_class = CrossheadViTModel
    forward = task_forward(stock.ViTForImageClassification.forward, CrossheadImageClassifierOutput)


# Checkpoints use the tensor names of older transformers releases, which renames them for the stock class only.
register_checkpoint_conversion_mapping(
    "CrossheadViTModel", get_checkpoint_conversion_mapping("ViTModel") or [], overwrite=True
)
