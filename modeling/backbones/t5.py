"""T5 with mechanisms in its attention; encoder, decoder and cross-attention are configured separately."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers.initialization as init
import transformers.models.t5.modeling_t5 as stock
from torch import Tensor, nn
from transformers import T5Config
from transformers.cache_utils import EncoderDecoderCache

from ..attention import CrossheadAttention
from ..cache import CACHE
from ..configuration import MixersConfig, complete_mixers, layer_settings
from ..encoder import (
    CrossheadSeq2SeqLMOutput,
    CrossheadSeq2SeqModelOutput,
    recording_forward,
    submodule_property,
    task_forward,
)
from ..mechanisms.base import HeadLayout, ParameterModule, Settings
from ..model import RECORDERS, CrossheadBackbone, CrossheadPreTrained
from ..options import refuse, unknown

__all__ = ["CrossheadT5Config", "CrossheadT5EncoderModel", "CrossheadT5ForConditionalGeneration", "CrossheadT5Model"]
ENCODER, DECODER, CROSS = "encoder", "decoder", "cross"
PARTS = (ENCODER, DECODER, CROSS)
"""Encoder self-attention, decoder self-attention, and cross-attention."""


class CrossheadT5Config(MixersConfig, T5Config):
    """`T5Config` plus `mixers`: a mapping from part (see `PARTS`) to mechanisms, or one mapping for all parts."""

    model_type = "crosshead_t5"
    class_prefix = "CrossheadT5"
    auto_classes = {
        "AutoModel": "Model",
        "AutoModelForSeq2SeqLM": "ForConditionalGeneration",
        "AutoModelForTextEncoding": "EncoderModel",
    }
    attribute_map = T5Config.attribute_map | {
        "num_key_value_heads": "num_heads",
        "attention_dropout": "dropout_rate",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    mixers: dict[str, Any] | None = None

    def attention_modules(self) -> list[tuple[str, int]]:
        """Return (part, layer) of each attention module, in the order of the forward pass of this model or stack."""
        encoder = [] if self.is_decoder else [(ENCODER, layer) for layer in range(self.num_layers)]
        layers = (self.num_decoder_layers or 0) if self.is_decoder or self.is_encoder_decoder else 0
        return encoder + [(part, layer) for layer in range(layers) for part in (DECODER, CROSS)]

    def check_mixers(self) -> None:
        """Check `mixers` and complete it to a mapping with all three parts."""
        mixers: Any = {} if self.mixers is None else self.mixers
        if isinstance(mixers, Mapping) and not any(part in PARTS for part in mixers):
            mixers = dict.fromkeys(PARTS, mixers)
        if not isinstance(mixers, Mapping):
            raise refuse("mixers", mixers, "use a mapping of mechanism to options, or of part to such a mapping")
        for part in mixers:
            if part not in PARTS:
                raise unknown("mixers", "part of the model", part, list(PARTS))
        layouts: dict[str, list[HeadLayout]] = {part: [] for part in PARTS}
        for index, (part, _) in enumerate(self.attention_modules()):
            layouts[part].append(self.layout_of_layer(index))
        self.mixers = {part: self._complete(part, mixers.get(part), layouts[part]) for part in PARTS}
        weights = {
            part: self.mixers[part]["mixture"]["balance_weight"]
            for part in PARTS
            if layouts[part] and "mixture" in self.mixers[part]
        }
        for part, weight in weights.items():
            if weight != next(iter(weights.values())):
                raise refuse(f"mixers.{part}.mixture.balance_weight", weight, "use one value for all parts")

    def _complete(self, part: str, mixers: Any, layouts: list[HeadLayout]) -> dict[str, Settings]:
        if not layouts and isinstance(mixers or {}, Mapping):  # this stack or model does not have the part
            return mixers or {}
        try:
            return complete_mixers({} if mixers is None else mixers, layouts)
        except ValueError as error:
            raise ValueError(f"mixers.{part}: {error}") from None

    def mechanisms(self) -> dict[str, Settings]:
        """Return the mechanisms of all parts; options come from the first part that has the mechanism."""
        return {
            name: options for part in reversed(PARTS) for name, options in (self.mixers or {}).get(part, {}).items()
        }

    def mixers_of_layer(self, layer: int) -> dict[str, Settings]:
        """Return the mechanisms of the attention module at index `layer` of `attention_modules()`."""
        part, inner = self.attention_modules()[layer]
        return layer_settings((self.mixers or {})[part], inner)

    def layout_of_layer(self, layer: int) -> HeadLayout:
        """Return the head layout of the attention module at index `layer` of `attention_modules()`."""
        return super().layout_of_layer(self.attention_modules()[layer][1])

    def layouts(self) -> list[HeadLayout]:
        """Return the head layout of each attention module."""
        return [self.layout_of_layer(index) for index in range(len(self.attention_modules()))]


class PlacedModule(nn.Module):
    """Derives the stock attention class's arguments for position bias and causality from the module's index."""

    def __init__(self, config: CrossheadT5Config, layer_idx: int) -> None:
        part, layer = config.attention_modules()[layer_idx]
        biased = layer == 0 and part != CROSS
        super().__init__(config, has_relative_attention_bias=biased, layer_idx=layer, is_causal=part == DECODER)


class ReadOnlyCache:
    """Read-only view of a filled cross-attention cache: `update` ignores its input and returns the cached tensors."""

    def __init__(self, cache: Any) -> None:
        self.layers = cache.layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values cached by this layer."""
        return self.layers[layer_idx].keys, self.layers[layer_idx].values


class CrossheadT5Attention(CrossheadAttention, PlacedModule, stock.T5Attention):  # type: ignore[misc]
    """T5 attention with mechanisms."""

    q_proj, k_proj, v_proj, o_proj = map(submodule_property, "qkvo")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the outputs, the position bias for the following layers, and the attention weights if available."""
        cache = both = kwargs.pop(CACHE, past_key_values)
        if isinstance(both, EncoderDecoderCache):
            cache = both.self_attention_cache
            if key_value_states is not None:
                cache = both.cross_attention_cache
                if both.is_updated.get(self.layer_idx):
                    cache, key_value_states = ReadOnlyCache(cache), key_value_states[:, :0]
                both.is_updated[self.layer_idx] = True
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self._position_bias(hidden_states.shape[1], cache)
        output, weights = super().forward(hidden_states, None, mask, cache, key_value_states, position_bias, **kwargs)
        return output, position_bias, weights

    def _position_bias(self, queries: int, cache: Any) -> Tensor:
        """Return the relative position bias (1, H, T, S)."""
        if cache is None:
            return self.compute_bias(queries, queries)
        past = cache.get_seq_length(self.layer_idx)
        past = past.clone() if isinstance(past, Tensor) else past  # a static cache updates it in place
        keys, _ = cache.get_mask_sizes(queries, self.layer_idx)
        return self.compute_bias(queries, keys, past_seen_tokens=past)


class CrossheadT5PreTrainedModel(CrossheadPreTrained, stock.T5PreTrainedModel):
    """Base class of the T5 models."""

    config: CrossheadT5Config
    attention_class = CrossheadT5Attention
    _supports_flex_attn = False  # the position bias is part of the mask
    _can_record_outputs = {**stock.T5PreTrainedModel._can_record_outputs, **RECORDERS}

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Custom code: the stock method would skip modules without direct parameters, which initialise their children.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise like the stock class, with the layer's own sizes; mechanism parameters use the hidden size."""
        factor, width = self.config.initializer_factor, self.config.d_model
        if isinstance(module, ParameterModule):
            module.initialise(factor * width**-0.5)
        if not isinstance(module, CrossheadT5Attention):
            return None if isinstance(module, ParameterModule) else super()._init_weights(module)
        fans = {"q": width * module.head_dim, "k": width, "v": width, "o": getattr(module.o, "in_features", width)}
        weights = {getattr(getattr(module, name), "weight", None): fan for name, fan in fans.items()}
        if module.has_relative_attention_bias:
            weights[module.relative_attention_bias.weight] = width
        for weight, fan in weights.items():
            if weight is not None:
                init.normal_(weight, mean=0.0, std=factor * fan**-0.5)


class CrossheadT5Stack(CrossheadBackbone, CrossheadT5PreTrainedModel, stock.T5Stack):
    """T5 encoder or decoder."""

    block: Any
    forward = recording_forward(stock.T5Stack.forward)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        modules = [(block.layer[0], "SelfAttention") for block in self.block]
        if self.config.is_decoder:
            cross = [(block.layer[1], "EncDecAttention") for block in self.block]
            modules = [entry for pair in zip(modules, cross, strict=True) for entry in pair]
        return ((index, parent, name) for index, (parent, name) in enumerate(modules))


class CrossheadT5Base(CrossheadT5PreTrainedModel):
    """Base class of the complete T5 models: replaces the stock stacks with `CrossheadT5Stack`."""

    accepts_loss_kwargs = False  # the loss is the mean over one call

    def __init__(self, config: CrossheadT5Config) -> None:
        self._check_config(config)
        super().__init__(config)

    def post_init(self) -> None:
        """Replace the stacks before the weights are initialised."""
        for name in (ENCODER, DECODER):
            if hasattr(self, name):
                config = getattr(self, name).config
                config.is_encoder_decoder = name == DECODER  # so that attention_modules() fits the stack
                setattr(self, name, CrossheadT5Stack(config))
        super().post_init()


class CrossheadT5Model(CrossheadT5Base, stock.T5Model):
    """T5 encoder-decoder without a language modelling head."""

    forward = task_forward(stock.T5Model.forward, CrossheadSeq2SeqModelOutput)


class CrossheadT5ForConditionalGeneration(CrossheadT5Base, stock.T5ForConditionalGeneration):
    """T5 sequence-to-sequence language model."""

    forward = task_forward(stock.T5ForConditionalGeneration.forward, CrossheadSeq2SeqLMOutput)


class CrossheadT5EncoderModel(CrossheadT5Base, stock.T5EncoderModel):
    """T5 encoder-only model."""
