"""The attention forward that all backbones share: transformers' own, with calls to the mechanisms' hooks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .cache import CACHE, update_cache
from .configuration import shared_layout
from .mechanisms import MECHANISMS
from .mechanisms.base import AttentionState
from .ops import HeadRMSNorm, add_position_bias, eager_attention_forward, split_heads


class HeadScale(HeadRMSNorm):
    """The weight of a key norm, without the division: `explicit` divides by the RMS of the combined keys instead."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `weight * x`."""
        return self.weight * x


class CrossheadAttention(nn.Module):
    """Mixin that adds mechanisms to attention; each backbone inherits from it and from the stock attention class."""

    config: Any
    layer_idx: int
    scaling: float
    is_causal: bool
    sliding_window: int | None = None
    rotate = staticmethod(apply_rotary_pos_emb)
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    q_norm: Any
    k_norm: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        settings = config.mixers_of_layer(layer_idx)
        layout = shared_layout(settings, config.layout_of_layer(layer_idx))
        self.mixers = nn.ModuleDict({name: MECHANISMS[name](layout, options) for name, options in settings.items()})
        self.head_dim, self.value_dim, self.dropout_p = layout.head_dim, layout.value_dim, layout.dropout
        self.key_dim = layout.head_dim
        self.output_dim = layout.query_heads * layout.value_dim // layout.output_heads
        self._resize(self.q_proj, layout.hidden_size, layout.query_heads * layout.head_dim)
        self._resize(self.k_proj, layout.hidden_size, layout.key_components * layout.head_dim, layout.projects_keys)
        self._resize(self.v_proj, layout.hidden_size, layout.value_components * layout.value_dim, layout.projects_keys)
        self._resize(self.o_proj, layout.output_heads * layout.output_dim, layout.hidden_size)
        self.has_key_norm = layout.key_norm_eps is not None
        if layout.key_norm_eps is not None:
            self.q_norm = HeadRMSNorm(layout.head_dim, layout.key_norm_eps)
            self.k_norm = (HeadScale if layout.combines_keys else HeadRMSNorm)(layout.head_dim, layout.key_norm_eps)
        # Names, not modules: wrappers such as peft's replace the modules.
        self.mapping_order = sorted(settings, key=lambda name: MECHANISMS[name].maps_last)
        self.output_order = sorted(settings, key=lambda name: not MECHANISMS[name].rules.replaces_attention)
        replaced = any(MECHANISMS[name].rules.replaces_attention for name in settings)
        self.wide_cache = not replaced and any(bool(mechanism.wide_cache) for mechanism in self.mixers.values())

    def _resize(self, stock: Any, inputs: int, outputs: int, linear: bool = True) -> None:
        if isinstance(stock, nn.Linear) and (stock.in_features, stock.out_features, True) != (inputs, outputs, linear):
            name = next(name for name, module in self.named_children() if module is stock)
            setattr(self, name, nn.Linear(inputs, outputs, stock.bias is not None) if linear else nn.Identity())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention outputs (B, T, hidden), and attention weights, None if the implementation has none.

        Keys and values come from `key_value_states` if given. `position_bias` (B or 1, H, T, S) is added to logits.
        """
        input_shape = hidden_states.shape[:-1]
        source = hidden_states if key_value_states is None else key_value_states
        query = split_heads(self.q_proj(hidden_states), self.head_dim)
        key = split_heads(self.k_proj(source), self.key_dim)
        value = split_heads(self.v_proj(source), self.value_dim)
        state = AttentionState(hidden_states, source, query, key, value, position_bias)

        mechanisms: Any = self.mixers
        for name in self.mapping_order:
            mechanisms[name].before_rope(state)
        if self.has_key_norm:
            state.query, state.key = self.q_norm(state.query), self.k_norm(state.key)
        if position_embeddings is not None:
            state.query, state.key = self.rotate(state.query, state.key, *position_embeddings)
        cache, paged = kwargs.pop(CACHE, past_key_values), "write_index" in kwargs  # paged: in continuous batching
        if cache is not None and not paged:
            update_cache(state, cache, self.layer_idx, self.wide_cache)
        masked = attention_mask is not None or position_bias is not None
        implementation = self._attention_function(state, masked, kwargs)
        if state.position_bias is not None:
            attention_mask = add_position_bias(attention_mask, state.position_bias, self.is_causal)
        for name in self.output_order:
            mechanisms[name].after_cache(state)
        if cache is not None and paged:  # the paged cache stores combined heads
            state.key, state.value = cache.update(state.key, state.value, self.layer_idx, kwargs=kwargs)

        attention_interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            implementation or "eager", eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            state.query,
            state.key,
            state.value,
            attention_mask,
            dropout=0.0 if not self.training else self.dropout_p,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **state.attention_kwargs,
            **kwargs,
        )
        attn_output = attn_output.reshape(*input_shape, -1, self.output_dim)
        for name in self.output_order:
            attn_output = mechanisms[name].head_outputs(attn_output, state)
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous()), attn_weights

    def _attention_function(self, state: AttentionState, masked: bool, kwargs: dict[str, Any]) -> str | None:
        """Return the function of the first mechanism that chooses one, else the model's `attn_implementation`."""
        implementation: str | None = self.config._attn_implementation
        for name in self.output_order if "write_index" not in kwargs else ():  # continuous batching needs stock ones
            mechanism: Any = self.mixers[name]
            state.function = mechanism.attention_function(state, implementation, masked)
            if state.function is not None:
                return state.function
        return implementation
