"""TransNeXt with mechanisms in its attention, for TransNeXt and MoH-ViT checkpoints; transformers has neither model.

Four stages of layers work on feature maps of decreasing size. Images may have any size: position tensors are computed
per size. Checkpoints use the tensor names of the published ones, including those of MoH-ViT's routers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import transformers.initialization as init
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.pvt_v2.modeling_pvt_v2 import PvtV2DepthWiseConv, PvtV2DropPath
from transformers.utils.generic import TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration import MixersConfig
from ..encoder import IMAGE_CLASSES, CrossheadImageClassifierOutput, recording_forward, task_forward
from ..mechanisms.base import HeadLayout
from ..model import RECORDERS, CrossheadBackbone, CrossheadPreTrained
from ..options import refuse
from .transnext_attention import (
    CrossheadAggregatedAttention,
    CrossheadTransNextAttention,
    CrossheadTransNextProjections,
    FeatureMap,
    feature_map,
)

__all__ = ["CrossheadTransNextConfig", "CrossheadTransNextForImageClassification", "CrossheadTransNextModel"]
STAGE_FIELDS = ("hidden_sizes", "num_attention_heads", "depths", "mlp_ratios", "sr_ratios")
ONE_LIST = "it needs the same keys for all queries, and here each pixel has a window of its own"


@dataclass(frozen=True)
class TransNextLimit:
    """A mechanism or option that TransNeXt does not support."""

    option: str
    """`mechanism`, or `mechanism.option` to refuse the option only if it is true."""
    reason: str
    everywhere: bool = True
    """True if unsupported in every layer; False if supported in layers with global attention."""


TRANSNEXT_LIMITS = (
    TransNextLimit("explicit", "keys are normalised to length one, and a combination of them is not"),
    TransNextLimit("bilinear", "keys are normalised to length one, and the layer's input, its key, is not"),
    TransNextLimit("talking", ONE_LIST, everywhere=False),
    TransNextLimit("differential", ONE_LIST, everywhere=False),
    TransNextLimit("differential.half_values", "files hold queries, keys and values of one size as one matrix"),
)


class CrossheadTransNextConfig(MixersConfig, PreTrainedConfig):
    """TransNeXt config plus `mixers`; defaults are TransNeXt-Small. Layer indices run through all stages."""

    model_type = "crosshead_transnext"
    class_prefix = "CrossheadTransNext"
    auto_classes = IMAGE_CLASSES

    image_size: int = 224
    """Image size in pretraining, to which distances in the position bias are relative; inputs may have other sizes."""
    num_channels: int = 3
    patch_size: int = 4
    """Stride of the first patch embedding; the other stages have stride 2."""
    hidden_sizes: list[int] | tuple[int, ...] = (72, 144, 288, 576)
    num_attention_heads: list[int] | tuple[int, ...] = (3, 6, 12, 24)
    depths: list[int] | tuple[int, ...] = (5, 5, 22, 5)
    mlp_ratios: list[int] | tuple[int, ...] = (8, 8, 4, 4)
    sr_ratios: list[int] | tuple[int, ...] = (8, 4, 2, 1)
    """Downsampling factor of the pooled feature map, per stage; 1 for global attention to all pixels."""
    window_size: int = 3
    qkv_bias: bool = True
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    drop_path_rate: float = 0.0
    """Stochastic depth rate of the last layer; it increases linearly from 0 at the first layer."""
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    mixers: dict[str, Any] | None = None

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers in all stages."""
        return sum(self.depths)

    @property
    def hidden_size(self) -> int:
        """Hidden size of the last stage, which the classifier reads."""
        return self.hidden_sizes[-1]

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage in range(len(self.depths)) if layer < sum(self.depths[: stage + 1]))

    def layout_of_layer(self, layer: int) -> HeadLayout:
        """Return the head layout of a layer."""
        stage = self.stage_of_layer(layer)
        size, heads = self.hidden_sizes[stage], self.num_attention_heads[stage]
        sizes: dict[str, Any] = {"norm_eps": self.layer_norm_eps, "dropout": self.attention_probs_dropout_prob}
        return HeadLayout(size, heads, heads, size // heads, layer_index=layer, is_rotary=False, **sizes)

    def check_mixers(self) -> None:
        """Check the sizes of the stages, then `mixers` as every backbone does, then `TRANSNEXT_LIMITS`."""
        for name in STAGE_FIELDS:
            values = getattr(self, name)
            if len(values) != len(self.depths) or not all(isinstance(value, int) and value > 0 for value in values):
                raise refuse(name, values, f"use {len(self.depths)} whole numbers from 1 up, one for each stage")
        for size, heads in zip(self.hidden_sizes, self.num_attention_heads, strict=True):
            if size % heads:
                raise refuse("num_attention_heads", heads, f"use a divisor of the stage's hidden size {size}")
        if self.window_size % 2 == 0:
            raise refuse("window_size", self.window_size, "use an odd number")
        super().check_mixers()
        for layer in range(self.num_hidden_layers):
            self._check_limits(layer)

    def _check_limits(self, layer: int) -> None:
        settings, ratio = self.mixers_of_layer(layer), self.sr_ratios[self.stage_of_layer(layer)]
        for limit in TRANSNEXT_LIMITS:
            mechanism, _, option = limit.option.partition(".")
            value = settings.get(mechanism)
            if option and value is not None:
                value = value[option] or None
            if value is not None and (limit.everywhere or ratio > 1):
                advice = "" if limit.everywhere else f" with sr_ratio={ratio}: use layers with sr_ratio=1"
                raise refuse(f"mixers.{limit.option}", value, f"{limit.reason} (layer {layer}{advice})")


class CrossheadTransNextMLP(nn.Module):
    """Convolutional GLU: a gated linear unit with a depthwise convolution in the gate."""

    def __init__(self, config: Any, stage: int) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        inner = 2 * size * config.mlp_ratios[stage] // 3
        self.fc1 = nn.Linear(size, 2 * inner)
        self.dwconv = PvtV2DepthWiseConv(config, inner)
        self.act = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(inner, size)
        self.drop = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, pixels: FeatureMap) -> Tensor:
        """Return hidden states (B, N, hidden)."""
        gate, value = self.fc1(hidden_states).chunk(2, dim=-1)
        gated = self.drop(self.act(self.dwconv(gate, pixels.height, pixels.width)) * value)
        output: Tensor = self.drop(self.fc2(gated))
        return output


class CrossheadTransNextLayer(GradientCheckpointingLayer):
    """Pre-norm transformer layer: attention and MLP, each with a residual connection."""

    def __init__(self, config: CrossheadTransNextConfig, layer_idx: int) -> None:
        super().__init__()
        stage = config.stage_of_layer(layer_idx)
        size, is_global = config.hidden_sizes[stage], config.sr_ratios[stage] == 1
        self.norm1 = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.attn = (CrossheadTransNextAttention if is_global else CrossheadAggregatedAttention)(config, layer_idx)
        self.drop = nn.Dropout(config.hidden_dropout_prob)
        self.norm2 = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp = CrossheadTransNextMLP(config, stage)
        self.drop_path = PvtV2DropPath(config.drop_path_rate * layer_idx / max(config.num_hidden_layers - 1, 1))

    def forward(self, hidden_states: Tensor, pixels: FeatureMap) -> Tensor:
        """Return hidden states (B, N, hidden)."""
        attended, _ = self.attn(self.norm1(hidden_states), pixels)
        hidden_states = hidden_states + self.drop_path(self.drop(attended))
        return hidden_states + self.drop_path(self.mlp(self.norm2(hidden_states), pixels))


class CrossheadTransNextPatchEmbedding(nn.Module):
    """Overlapping patch embedding at the start of a stage."""

    def __init__(self, config: CrossheadTransNextConfig, stage: int) -> None:
        super().__init__()
        channels = config.hidden_sizes[stage - 1] if stage else config.num_channels
        stride = 2 if stage else config.patch_size
        kernel = 2 * stride - 1
        self.proj = nn.Conv2d(channels, config.hidden_sizes[stage], kernel, stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(config.hidden_sizes[stage])

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return hidden states (B, N, hidden) from maps (B, channels, height, width), and the new (height, width)."""
        maps = self.proj(images)
        return self.norm(maps.flatten(2).transpose(1, 2)), maps.shape[2:]


class CrossheadTransNextPreTrainedModel(CrossheadPreTrained, PreTrainedModel):
    """Base class of the TransNeXt models."""

    config: CrossheadTransNextConfig
    base_model_prefix = "transnext"
    main_input_name = "pixel_values"
    _input_embed_layer = "patch_embed1"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["CrossheadTransNextLayer"]
    _can_record_outputs = RECORDERS | {
        "hidden_states": CrossheadTransNextLayer,
        "attentions": CrossheadTransNextProjections,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            init.normal_(module.weight, std=math.sqrt(2 / fan_out))


class CrossheadTransNextModel(CrossheadBackbone, CrossheadTransNextPreTrainedModel):
    """TransNeXt backbone: the stages, each with patch embedding, layers and norm."""

    def __init__(self, config: CrossheadTransNextConfig) -> None:
        super().__init__(config)
        for stage, depth in enumerate(config.depths):
            first = sum(config.depths[:stage])
            layers = [CrossheadTransNextLayer(config, layer) for layer in range(first, first + depth)]
            self.add_module(f"patch_embed{stage + 1}", CrossheadTransNextPatchEmbedding(config, stage))
            self.add_module(f"block{stage + 1}", nn.ModuleList(layers))
            norm = nn.LayerNorm(config.hidden_sizes[stage], eps=config.layer_norm_eps)
            self.add_module(f"norm{stage + 1}", norm)
        self.post_init()

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        blocks = [getattr(self, f"block{stage + 1}") for stage in range(len(self.config.depths))]
        return ((index, layer, "attn") for index, layer in enumerate(layer for block in blocks for layer in block))

    @recording_forward
    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, **kwargs: Unpack[TransformersKwargs]) -> BaseModelOutputWithPooling:
        """Return the last feature map (B, N, hidden) after its norm, and its mean over the N pixels."""
        hidden_states, config = pixel_values.to(self.dtype), self.config
        for stage, reduction in enumerate(config.sr_ratios):
            hidden_states, size = getattr(self, f"patch_embed{stage + 1}")(hidden_states)
            pretrained = config.image_size // (config.patch_size * 2**stage)
            pixels = feature_map(size, reduction, config.window_size, pretrained, hidden_states)
            for layer in getattr(self, f"block{stage + 1}"):
                hidden_states = layer(hidden_states, pixels)
            hidden_states = getattr(self, f"norm{stage + 1}")(hidden_states)
            if stage < len(config.depths) - 1:
                hidden_states = hidden_states.transpose(1, 2).unflatten(2, size)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states.mean(1))


class CrossheadTransNextForImageClassification(CrossheadTransNextPreTrainedModel):
    """TransNeXt image classifier."""

    accepts_loss_kwargs = False  # the loss is the mean over one call

    def __init__(self, config: CrossheadTransNextConfig) -> None:
        self._check_config(config)
        super().__init__(config)
        self.transnext = CrossheadTransNextModel(config)
        self.head = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    def _classify(self, pixel_values: Tensor, labels: Any = None, **kwargs: Unpack[TransformersKwargs]) -> Any:
        """Return the logits, and the loss if there are labels."""
        outputs = self.transnext(pixel_values, **kwargs)
        logits = self.head(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    forward = task_forward(_classify, CrossheadImageClassifierOutput)


ROUTERS = {"wg": "routed", "wg_1": "shared", "wg_0": "balance"}
"""Router name in published MoH-ViT checkpoints -> name in the `mixture` mechanism."""

register_checkpoint_conversion_mapping(
    CrossheadTransNextConfig.model_type,
    [
        *(WeightRenaming(rf"\.attn\.{old}\.", f".attn.mixers.mixture.{new}.") for old, new in ROUTERS.items()),
        WeightRenaming(r"\.attn\.q\.", ".attn.q_proj."),
        WeightRenaming(r"\.attn\.proj\.", ".attn.o_proj."),
        *(
            WeightConverter(
                f"attn.{joint}.{kind}", [f"attn.{joint}.{part}_proj.{kind}" for part in joint], [Chunk(dim=0)]
            )
            for joint in ("kv", "qkv")
            for kind in ("weight", "bias")
        ),
    ],
    overwrite=True,
)
