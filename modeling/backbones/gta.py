"""Grouped tied attention (GTA), in Llama's layers, with mechanisms.

A key/value head is one tied state: all of it is the value, and its first half is the first half of the key, without
positions. The second half of the key is one rotated half-head, the same for all heads. The cache holds the tied states
and that half-head. There are no stock checkpoints: models are trained from scratch.

Paper: "Hardware-Efficient Attention for Fast Decoding", section 3.3.
"""

from copy import copy
from typing import Any

import torch
import transformers.models.llama.modeling_llama as stock
from torch import Tensor
from transformers import LlamaConfig

from ..attention import CrossheadAttention
from ..configuration import MixersConfig
from ..latent import NO_HALF_VALUES, NO_KEY_MAP, Refusal, check_refused
from ..mechanisms.base import AttentionState
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained
from ..options import refuse

__all__ = [
    "CrossheadGtaConfig",
    "CrossheadGtaForCausalLM",
    "CrossheadGtaForSequenceClassification",
    "CrossheadGtaModel",
]


class CrossheadGtaConfig(MixersConfig, LlamaConfig):
    """`LlamaConfig` plus `mixers`; the rotated half-head has `head_dim / 2` features."""

    model_type = "crosshead_gta"
    class_prefix = "CrossheadGta"
    refused = (
        Refusal("explicit", "a key/value head is one tied state: keys and values cannot be combined apart"),
        Refusal("knocking", NO_KEY_MAP, "on", "key"),
        Refusal("differential", NO_HALF_VALUES, "half_values", True),
    )
    mixers: dict[str, Any] | None = None

    def check_mixers(self) -> None:
        """Half of a head is rotated, in pairs of features."""
        if self.layout_of_layer(0).head_dim % 4:
            raise refuse("head_dim", self.head_dim, "half of it is rotated in pairs: use a multiple of 4")
        check_refused(self.refused, self.mixers)
        super().check_mixers()


class CrossheadGtaAttention(CrossheadAttention, stock.LlamaAttention):  # type: ignore[misc]
    """Its attention: `v_proj` makes tied states, `k_proj` the half-head of positions."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_dim = self.head_dim // 2
        self._resize(self.k_proj, config.hidden_size, self.key_dim)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the second half of queries, and the half-head."""
        plain, rotary = query.chunk(2, dim=-1)
        rotary, key = stock.apply_rotary_pos_emb(rotary, key, cos, sin)
        return torch.cat((plain, rotary), dim=-1), key

    def _attention_function(self, state: AttentionState, masked: bool, kwargs: dict[str, Any]) -> str | None:
        tied = state.value[..., : self.head_dim - self.key_dim]
        state.key = torch.cat((tied, state.key.expand(-1, tied.shape[1], -1, -1)), dim=-1)
        return super()._attention_function(state, masked, kwargs)


class CrossheadGtaPreTrainedModel(CrossheadPreTrained, stock.LlamaPreTrainedModel):
    """The common part of its models."""

    config: CrossheadGtaConfig
    attention_class = CrossheadGtaAttention
    _can_record_outputs = {**stock.LlamaPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadGtaModel(CrossheadBackbone, CrossheadGtaPreTrainedModel, stock.LlamaModel):
    """Its decoder."""

    rotary_emb: Any

    def post_init(self) -> None:
        """Positions for half a head."""
        half = copy(self.config)
        half.head_dim = self.config.layout_of_layer(0).head_dim // 2
        self.rotary_emb = stock.LlamaRotaryEmbedding(config=half)
        for index, layer in enumerate(self.layers):
            layer.self_attn = CrossheadGtaAttention(self.config, index)
        super().post_init()


class CrossheadGtaForCausalLM(CrossheadCausalLM, CrossheadGtaPreTrainedModel, stock.LlamaForCausalLM):
    """Its language model."""

    backbone_class = CrossheadGtaModel


class CrossheadGtaForSequenceClassification(
    CrossheadClassifier, CrossheadGtaPreTrainedModel, stock.LlamaForSequenceClassification
):
    """Its sequence classifier."""

    backbone_class = CrossheadGtaModel
