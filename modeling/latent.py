"""The part that backbones with shared rotary keys add: one rotated part of keys for all heads, and a smaller cache.

Multi-head latent attention (MLA) makes the keys and values of all heads from one latent vector of a token. The cache
holds that vector and the rotated part, as the library's own does; keys and values are expanded from what it holds.

Papers: "DeepSeek-V2", section 2.1; "Hardware-Efficient Attention for Fast Decoding", section 3.3.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .attention import CrossheadAttention
from .configuration import MixersConfig
from .mechanisms.base import AttentionState, HeadLayout, Refusal
from .ops import HeadRMSNorm
from .options import refuse

NO_KEY_MAP = "a part of each key is shared by all heads, so that a head has no key of its own: use query or value"
NO_HALF_VALUES = "keys and values are made together, and values keep their size: use False"


class SharedRotaryAttention(CrossheadAttention):
    """Attention whose keys share their rotated features; queries rotate as many, their last."""

    apply_rotary: Any

    def rotate(self, query: Tensor, key: Tensor, *position_embeddings: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Queries (B, H, T, d) with positions in their last features, and the rotated shared key (B, 1, S, r)."""
        plain, rotary = query.split([query.shape[-1] - key.shape[-1], key.shape[-1]], dim=-1)
        rotary, key = self.apply_rotary(rotary, key, *position_embeddings)
        return torch.cat((plain, rotary), dim=-1), key


class LatentConfig(MixersConfig):
    """The configuration of a backbone with MLA."""

    refused = (
        Refusal("explicit", "keys and values are expanded from one latent vector: there are no KV heads to combine"),
        Refusal("knocking", NO_KEY_MAP, "on", "key"),
        Refusal("differential", NO_HALF_VALUES, "half_values", True),
        Refusal("differential", "each query head has a key and value head of its own: use 1", "version", 2),
    )
    num_attention_heads: int
    num_key_value_heads: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def check_mixers(self) -> None:
        """A key and a value head for each query head."""
        super().check_mixers()
        if self.num_key_value_heads != self.num_attention_heads:
            reason = f"keys and values are expanded for each head: use num_attention_heads={self.num_attention_heads}"
            raise refuse("num_key_value_heads", self.num_key_value_heads, reason)

    def layout_of_layer(self, layer: int) -> HeadLayout:
        """The shape of one layer; `head_dim` is that of the rotated part in the stock configuration."""
        return replace(
            super().layout_of_layer(layer),
            key_value_heads=self.num_attention_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            latent_dim=self.kv_lora_rank + self.qk_rope_head_dim,
        )


class LatentAttention(SharedRotaryAttention):
    """MLA; combined with the stock class, which has the projections and `expand_kv`.

    In `k_proj` and `v_proj`, the input is the compressed vector of each token: keys are its rotary part, values its
    latent part, until both are read from the cache.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    expand_kv: Any
    kv_a_proj_with_mqa: Any
    q_a_proj: Any
    q_b_proj: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_dim, self.value_dim = self.qk_rope_head_dim, self.kv_lora_rank
        # As the stock norms, but float64 stays.
        self.kv_a_layernorm = HeadRMSNorm(self.kv_lora_rank, self.kv_a_layernorm.variance_epsilon)  # type: ignore[has-type]
        if self.q_lora_rank is not None:
            self.q_a_layernorm = HeadRMSNorm(self.q_lora_rank, self.q_a_layernorm.variance_epsilon)  # type: ignore[has-type]
            self.q_proj = self.compressed_query  # the stock class has None

    def compressed_query(self, x: Tensor) -> Tensor:
        """Queries by way of a low rank."""
        query: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return query

    def k_proj(self, x: Tensor) -> Tensor:
        """The part of the key that all heads share, before positions."""
        return x[..., self.kv_lora_rank :]

    def v_proj(self, x: Tensor) -> Tensor:
        """The latent vector that the rest of the keys, and the values, are expanded from."""
        latent: Tensor = self.kv_a_layernorm(x[..., : self.kv_lora_rank])
        return latent

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention outputs (B, T, hidden), and the attention weights where the implementation returns them."""
        if isinstance(position_embeddings, Tensor):
            position_embeddings = (position_embeddings,)
        source = self.kv_a_proj_with_mqa(hidden_states)
        return super().forward(hidden_states, position_embeddings, key_value_states=source, **kwargs)

    def read_cache(self, state: AttentionState, past_key_values: Cache | None) -> None:
        """Expand the keys and values of all tokens."""
        super().read_cache(state, past_key_values)
        state.key, state.value = self.expand_kv(state.value, state.key)
