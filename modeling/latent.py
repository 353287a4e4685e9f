"""The part that backbones with multi-head latent attention (MLA) share.

The keys and values of all heads are expanded from one latent vector per token; all heads share one rotated part of the
keys. The cache holds the latent vector and the rotated part, as in transformers.

Paper: "DeepSeek-V2", section 2.1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .attention import CrossheadAttention
from .cache import CACHE
from .configuration import MixersConfig
from .mechanisms.base import HeadLayout
from .ops import HeadRMSNorm
from .options import refuse

NO_KEY_MAP = "a part of each key is shared by all heads, so that a head has no key of its own: use query or value"
NO_HALF_VALUES = "keys and values share a projection, and values keep their size: use False"
NO_KEY_INPUT = "keys are expanded from the cache, which holds no input of the layer: use terms of queries"


class Refusal(NamedTuple):
    """A mechanism, or one value of an option of it, that a backbone refuses."""

    mechanism: str
    reason: str
    option: str = ""
    value: Any = None


def check_refused(refused: Iterable[Refusal], mixers: Any) -> None:
    """Raise `ValueError` if `mixers`, which may be incomplete, holds a refused mechanism or option value."""
    for refusal in refused:
        if isinstance(mixers, Mapping) and refusal.mechanism in mixers:
            options = mixers[refusal.mechanism]
            value = options.get(refusal.option) if isinstance(options, Mapping) else None
            if not refusal.option or refusal.value in (value if isinstance(value, list | tuple) else [value]):
                name = ".".join(filter(None, ("mixers", refusal.mechanism, refusal.option)))
                raise refuse(name, value if refusal.option else options, refusal.reason)


class LatentConfig(MixersConfig):
    """Base configuration of backbones with multi-head latent attention."""

    refused = (
        Refusal("explicit", "keys and values are expanded from one latent vector: there are no KV heads to combine"),
        Refusal("knocking", NO_KEY_MAP, "on", "key"),
        Refusal("talking", NO_KEY_INPUT, "dynamic", "key_logits"),
        Refusal("talking", NO_KEY_INPUT, "dynamic", "key_weights"),
        Refusal("differential", NO_HALF_VALUES, "half_values", True),
        Refusal("differential", "each query head has a key and value head of its own: use 1", "version", 2),
    )
    num_attention_heads: int
    num_key_value_heads: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: Any

    def check_mixers(self) -> None:
        """Refuse mechanisms that MLA cannot have, and key/value heads that differ in number from query heads."""
        check_refused(self.refused, self.mixers)
        super().check_mixers()
        if self.mixers and self.num_key_value_heads != self.num_attention_heads:
            reason = f"keys and values are expanded for each head: use num_attention_heads={self.num_attention_heads}"
            raise refuse("num_key_value_heads", self.num_key_value_heads, reason)

    def layout_of_layer(self, layer: int) -> HeadLayout:
        """Return the layout of one layer; the stock field `head_dim` is the size of the rotated part alone."""
        return replace(
            super().layout_of_layer(layer),
            key_value_heads=self.num_attention_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
        )


class LatentAttention(CrossheadAttention):
    """Multi-head latent attention; projections and `expand_kv` come from the stock class, the other base class."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    apply_rotary: Any
    expand_kv: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    q_a_layernorm: Any
    q_a_proj: Any
    q_b_proj: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.key_features = config.num_attention_heads * self.head_dim
        # Like the stock norms, except that float64 is kept.
        self.kv_a_layernorm = HeadRMSNorm(self.kv_lora_rank, self.kv_a_layernorm.variance_epsilon)
        if self.q_lora_rank is not None:
            self.q_a_layernorm = HeadRMSNorm(self.q_lora_rank, self.q_a_layernorm.variance_epsilon)
            self.q_proj = self.compressed_query  # None in the stock class

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()
        if self.q_lora_rank is not None:
            replica.q_proj = replica.compressed_query  # else it would call the original's modules
        return replica

    def compressed_query(self, x: Tensor) -> Tensor:
        """Return queries (B, T, features) from a low-rank projection."""
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def k_proj(self, x: Tensor) -> Tensor:
        """Return the keys from concatenated expanded keys and values (B, S, features)."""
        return x[..., : self.key_features]

    def v_proj(self, x: Tensor) -> Tensor:
        """Return the values from concatenated expanded keys and values (B, S, features)."""
        return x[..., self.key_features :]

    def rotate(self, query: Tensor, key: Tensor, *position_embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the last `qk_rope_head_dim` features of queries; the keys in the cache are rotated already."""
        unrotated, rotary = query.split([query.shape[-1] - self.qk_rope_head_dim, self.qk_rope_head_dim], dim=-1)
        rotary, _ = self.apply_rotary(rotary, rotary[:, :1], *position_embeddings)
        return torch.cat((unrotated, rotary), dim=-1), key.contiguous()

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention outputs (B, T, hidden), and attention weights, None if the implementation has none."""
        is_tensor = isinstance(position_embeddings, Tensor)
        positions: Any = (position_embeddings,) if is_tensor else position_embeddings
        sizes = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, rotary = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split(sizes, dim=-1)  # (B, 1, T, size)
        latent, (_, rotary) = self.kv_a_layernorm(latent), self.apply_rotary(rotary, rotary, *positions)
        if (cache := kwargs.pop(CACHE, past_key_values)) is not None:
            latent, rotary = cache.update(latent, rotary, self.layer_idx)
        expanded = torch.cat([heads.transpose(1, 2).flatten(2) for heads in self.expand_kv(latent, rotary)], dim=-1)
        return super().forward(hidden_states, positions, attention_mask, key_value_states=expanded, **kwargs)
