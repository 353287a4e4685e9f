"""Grouped tied attention (GTA) in Llama layers, with mechanisms.

Each key/value head has one tied state: it is the value, and its first half is the first half of the key, without
RoPE. The second half of the key is one half-head with RoPE that all heads share. The cache holds the tied states and
this half-head. There are no stock checkpoints: models are trained from scratch.

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
    """`LlamaConfig` plus `mixers`; the shared half-head with RoPE has `head_dim / 2` features."""

    model_type = "crosshead_gta"
    class_prefix = "CrossheadGta"
    refused = (
        Refusal("explicit", "a key/value head is one tied state: keys and values cannot be combined apart"),
        Refusal("knocking", NO_KEY_MAP, "on", "key"),
        Refusal("differential", NO_HALF_VALUES, "half_values", True),
    )
    mixers: dict[str, Any] | None = None

    def check_mixers(self) -> None:
        """Check that half of `head_dim` is even for RoPE, then check `mixers`."""
        if self.layout_of_layer(0).head_dim % 4:
            raise refuse("head_dim", self.head_dim, "half of it is rotated in pairs: use a multiple of 4")
        check_refused(self.refused, self.mixers)
        super().check_mixers()


class CrossheadGtaAttention(CrossheadAttention, stock.LlamaAttention):  # type: ignore[misc]
    """GTA with mechanisms: `v_proj` yields the tied states, `k_proj` the shared half-head with RoPE."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_dim = self.head_dim // 2
        self._resize(self.k_proj, config.hidden_size, self.key_dim)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply RoPE to the second half of each query and to the shared half-head."""
        plain, rotary = query.chunk(2, dim=-1)
        rotary, key = stock.apply_rotary_pos_emb(rotary, key, cos, sin)
        return torch.cat((plain, rotary), dim=-1), key

    def _attention_function(self, state: AttentionState, masked: bool, kwargs: dict[str, Any]) -> str | None:
        tied = state.value[..., : self.head_dim - self.key_dim]
        state.key = torch.cat((tied, state.key.expand(-1, tied.shape[1], -1, -1)), dim=-1)
        return super()._attention_function(state, masked, kwargs)


class CrossheadGtaPreTrainedModel(CrossheadPreTrained, stock.LlamaPreTrainedModel):
    """Base class of the GTA models."""

    config: CrossheadGtaConfig
    attention_class = CrossheadGtaAttention
    _can_record_outputs = {**stock.LlamaPreTrainedModel._can_record_outputs, **RECORDERS}


class CrossheadGtaModel(CrossheadBackbone, CrossheadGtaPreTrainedModel, stock.LlamaModel):
    """GTA decoder."""

    rotary_emb: Any

    def post_init(self) -> None:
        """Set up RoPE for half of `head_dim`, and replace the attention of all layers."""
        half = copy(self.config)
        half.head_dim = self.config.layout_of_layer(0).head_dim // 2
        self.rotary_emb = stock.LlamaRotaryEmbedding(config=half)
        for index, layer in enumerate(self.layers):
            layer.self_attn = CrossheadGtaAttention(self.config, index)
        super().post_init()


class CrossheadGtaForCausalLM(CrossheadCausalLM, CrossheadGtaPreTrainedModel, stock.LlamaForCausalLM):
    """GTA causal language model."""

    backbone_class = CrossheadGtaModel


class CrossheadGtaForSequenceClassification(
    CrossheadClassifier, CrossheadGtaPreTrainedModel, stock.LlamaForSequenceClassification
):
    """GTA sequence classifier."""

    backbone_class = CrossheadGtaModel
