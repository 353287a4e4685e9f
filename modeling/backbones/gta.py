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
from torch import nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache

from ..configuration import MixersConfig
from ..latent import NO_HALF_VALUES, NO_KEY_MAP, SharedRotaryAttention
from ..mechanisms.base import AttentionState, Refusal
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
        super().check_mixers()


class CrossheadGtaAttention(SharedRotaryAttention, stock.LlamaAttention):  # type: ignore[misc]
    """Its attention: `v_proj` makes tied states, `k_proj` the half-head of positions."""

    apply_rotary = staticmethod(stock.apply_rotary_pos_emb)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_dim = self.head_dim // 2
        self._resize(self.k_proj, config.hidden_size, self.key_dim)

    def read_cache(self, state: AttentionState, past_key_values: Cache | None) -> None:
        """Make keys of the tied states and the half-head."""
        super().read_cache(state, past_key_values)
        tied = state.value[..., : self.head_dim - self.key_dim]
        state.key = torch.cat((tied, state.key.expand(-1, tied.shape[1], -1, -1)), dim=-1)


class CrossheadGtaPreTrainedModel(CrossheadPreTrained, stock.LlamaPreTrainedModel):
    """The common part of its models."""

    config: CrossheadGtaConfig
    attention_class = CrossheadGtaAttention
    _can_record_outputs = {**stock.LlamaPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadGtaModel(CrossheadBackbone, CrossheadGtaPreTrainedModel, stock.LlamaModel):
    """Its decoder."""

    rotary_emb: nn.Module

    def post_init(self) -> None:
        """Positions for half a head."""
        half = copy(self.config)
        half.head_dim = self.config.layout_of_layer(0).head_dim // 2
        self.rotary_emb = stock.LlamaRotaryEmbedding(config=half)
        super().post_init()

    def _has_own_attention(self, layer: int) -> bool:
        return True


class CrossheadGtaForCausalLM(CrossheadCausalLM, CrossheadGtaPreTrainedModel, stock.LlamaForCausalLM):
    """Its language model."""

    backbone_class = CrossheadGtaModel


class CrossheadGtaForSequenceClassification(
    CrossheadClassifier, CrossheadGtaPreTrainedModel, stock.LlamaForSequenceClassification
):
    """Its sequence classifier."""

    backbone_class = CrossheadGtaModel
