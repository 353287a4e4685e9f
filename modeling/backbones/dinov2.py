"""DINOv2 with mechanisms in its attention."""

from collections.abc import Iterator
from functools import wraps
from typing import Any

import transformers.models.dinov2.modeling_dinov2 as stock
from torch import nn
from transformers import Dinov2Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..configuration import MixersConfig, shared_layout
from ..encoder import (
    ENCODER_FIELDS,
    IMAGE_CLASSES,
    CrossheadImageClassifierOutput,
    CrossheadTask,
    EncoderAttention,
    IndexedAttention,
    recording_forward,
    submodule_property,
    task_forward,
)
from ..model import RECORDERS, CrossheadBackbone, CrossheadPreTrained

__all__ = ["CrossheadDinov2Config", "CrossheadDinov2ForImageClassification", "CrossheadDinov2Model"]
NESTED = hasattr(stock, "Dinov2SelfAttention")
"""True in older transformers releases, where attention is a nested module without the output projection."""
STOCK_ATTENTION: Any = getattr(stock, "Dinov2SelfAttention", stock.Dinov2Attention)


class CrossheadDinov2Config(MixersConfig, Dinov2Config):
    """`Dinov2Config` plus `mixers`."""

    model_type = "crosshead_dinov2"
    class_prefix = "CrossheadDinov2"
    auto_classes = IMAGE_CLASSES
    attribute_map = ENCODER_FIELDS
    mixers: dict[str, Any] | None = None


class CrossheadDinov2Attention(EncoderAttention, IndexedAttention, STOCK_ATTENTION):  # type: ignore[misc]
    """DINOv2 attention with mechanisms."""

    if NESTED:
        q_proj, k_proj, v_proj = map(submodule_property, ("query", "key", "value"))
        o_proj = nn.Identity()


class CrossheadDinov2PreTrainedModel(CrossheadPreTrained, stock.Dinov2PreTrainedModel):
    """Base class of the DINOv2 models."""

    config: CrossheadDinov2Config
    attention_class = CrossheadDinov2Attention
    _can_record_outputs = {**stock.Dinov2PreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadDinov2Encoder(CrossheadBackbone, CrossheadDinov2PreTrainedModel, stock.Dinov2Encoder):
    """DINOv2 encoder layers."""

    layer: Any
    forward = recording_forward(stock.Dinov2Encoder.forward)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        for index, layer in enumerate(self.layer):
            if NESTED:
                layout = shared_layout(self.config.mixers_of_layer(index), self.config.layout_of_layer(index))
                output, inputs = layer.attention.output, layout.output_heads * layout.output_dim
                if output.dense.in_features != inputs:
                    output.dense = nn.Linear(inputs, layout.hidden_size)
            yield index, layer.attention if NESTED else layer, "attention"


class CrossheadDinov2Model(CrossheadDinov2PreTrainedModel, stock.Dinov2Model):
    """DINOv2 model: embeddings and encoder."""

    def __init__(self, config: CrossheadDinov2Config) -> None:
        self._check_config(config)
        super().__init__(config)

    def post_init(self) -> None:
        """Replace the stock encoder before the weights are initialised."""
        if any(getattr(module, "gradient_checkpointing", False) for module in self.encoder.modules()):
            # The stock encoder has removed `gradient_checkpointing` from the config.
            self.config.gradient_checkpointing = True
        self.encoder = CrossheadDinov2Encoder(self.config)
        super().post_init()

    @wraps(stock.Dinov2Model.forward)
    def forward(  # type: ignore[override]
        self, *inputs: Any, backbone_outputs: list[Any] | None = None, **kwargs: Any
    ) -> Any:
        """Return the stock outputs, plus `head_router_scores` if the encoder recorded them."""
        recorded: list[Any] = [] if backbone_outputs is None else backbone_outputs
        outputs = super().forward(*inputs, backbone_outputs=recorded, **kwargs)
        if not isinstance(outputs, tuple) and "head_router_scores" in recorded[-1][1]:
            outputs["head_router_scores"] = recorded[-1][1]["head_router_scores"]
        return outputs


class CrossheadDinov2ForImageClassification(
    CrossheadTask, CrossheadDinov2PreTrainedModel, stock.Dinov2ForImageClassification
):
    """DINOv2 image classifier."""

    backbone_class = CrossheadDinov2Model
    forward = task_forward(stock.Dinov2ForImageClassification.forward, CrossheadImageClassifierOutput)


# Checkpoints use the tensor names of older transformers releases, except for the mechanisms' tensors.
register_checkpoint_conversion_mapping(
    "CrossheadDinov2Model",
    [WeightRenaming("attention.mixers", "attention.attention.mixers")]
    if NESTED
    else get_checkpoint_conversion_mapping("Dinov2Model") or [],
    overwrite=True,
)
