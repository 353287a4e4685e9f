"""The one attention forward of all backbones: projection, mechanisms, positions, cache, attention, output."""

from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from .eager import eager_attention
from .folded_projection import FoldedProjection, folds
from .head_cache import pass_cache, split_heads
from .mechanisms import MECHANISMS
from .mixer import MASKED_HERE, Attended, AttentionCall, HeadStates, Mixer
from .numerics import HeadRMSNorm, HeadScaleRMSNorm
from .rotary import rotated
from .settings import shared_layout
from .traced import traced


class MixedAttention(nn.Module):
    """Turns a stock attention into one with mechanisms; combined with the stock class of each backbone below."""

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    is_causal: bool
    sliding_window: int | None = None
    """Where the backbone has none."""
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: Any
    k_norm: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        settings = config.mixers_of_layer(layer_idx)
        layout = shared_layout(settings, config.layout_of_layer(layer_idx))
        self.mixers = nn.ModuleDict({name: MECHANISMS[name](layout, options) for name, options in settings.items()})
        for side, projection in (("key", "k_proj"), ("value", "v_proj")):
            heads = min(mixer.component_heads(side) for mixer in self._mixers())
            if heads != layout.key_value_heads:
                has_bias = getattr(self, projection).bias is not None
                setattr(self, projection, nn.Linear(layout.hidden_size, heads * layout.head_dim, bias=has_bias))
        self._norms_heads = layout.key_norm_eps is not None
        if layout.key_norm_eps is not None:
            # A combination of normed keys is not the normed combination: the mechanism divides, the norm only scales.
            divides = any(mixer.divides_keys for mixer in self._mixers())
            self.q_norm = HeadRMSNorm(layout.head_dim, layout.key_norm_eps)
            self.k_norm = (HeadScaleRMSNorm if divides else HeadRMSNorm)(layout.head_dim, layout.key_norm_eps)
        owned = any(mixer.owns_attention for mixer in self._mixers())
        self._side_by_side = not owned and any(mixer.reads_side_by_side for mixer in self._mixers())
        self._folded = {side: FoldedProjection() for side in ("query", "key", "value")}

    def _mixers(self) -> list[Mixer]:
        return list(self.mixers.values())  # type: ignore[arg-type]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention outputs (B, T, hidden), and the attention weights where the backend computes them."""
        call, mixers = self._call(attention_mask, kwargs), self._mixers()
        states = self._project(hidden_states, mixers, call)
        for mixer in mixers:
            mixer.on_projected(states)
        for mixer in mixers:
            mixer.on_settled(states)
        self._place(states, position_embeddings)
        if past_key_values is not None:
            pass_cache(states, past_key_values, self.layer_idx, self._side_by_side)
        output, weights = self._attend(states, mixers, call)
        *others, last = mixers if len(mixers) == 1 else sorted(mixers, key=lambda mixer: not mixer.owns_attention)
        for mixer in others:
            output = mixer.on_output(output, states)
        if not others and (chosen := last.chosen_tokens(self.o_proj, states, call)) is not None:
            return chosen.project_out(self.o_proj, last.on_output(output, states)), weights
        return last.project_out(self.o_proj, output, states), weights

    def _attend(self, states: HeadStates, mixers: list[Mixer], call: AttentionCall) -> Attended:
        """By the mechanism that owns it, else by the first that has a way of its own, else by the backend."""
        owners = [mixer for mixer in mixers if mixer.owns_attention]
        if not owners:
            for mixer in mixers:
                if (attended := mixer.attend_cached(states, call)) is not None:
                    return attended
        for mixer in mixers:
            mixer.on_cached(states)
        for mixer in owners or mixers:
            if (attended := mixer.attend(states, call)) is not None:
                return attended
        return call.run(states.query, states.key, states.value)

    def _project(self, hidden: torch.Tensor, mixers: list[Mixer], call: AttentionCall) -> HeadStates:
        empty = hidden.new_empty(0)
        states = HeadStates(hidden, hidden, empty, empty, empty)
        for mixer in mixers:
            mixer.on_hidden(states)
        folded: set[str] = set()
        may_fold = not traced()
        for side, projection in {"query": self.q_proj, "key": self.k_proj, "value": self.v_proj}.items():
            behind, chosen = mixers[0].linear_map(side), None
            if side == "query" and len(mixers) == 1:
                chosen = mixers[0].chosen_tokens(projection, states, call)
            if chosen is not None:
                heads = chosen.project_in(projection, hidden)
            elif may_fold and behind is not None and folds(self._folded[side], projection, behind, self.training):
                folded.add(side)
                heads = self._folded[side](projection, behind, self.head_dim, hidden)
            else:
                heads = projection(hidden)
            setattr(states, side, split_heads(heads, heads.shape[-1] // self.head_dim))
        states.folded = frozenset(folded)
        return states

    def train(self, mode: bool = True) -> Self:
        """What was folded for evaluation is let go."""
        self._unfold()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """The same where weights move."""
        self._unfold()
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        """The same where a module is set, as where an adapter takes a projection's place, or gives it back."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and "_folded" in vars(self):
            self._unfold()

    def _unfold(self) -> None:
        for folded in self._folded.values():
            folded.clear()

    def _place(self, states: HeadStates, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self._norms_heads:
            states.query, states.key = self.q_norm(states.query), self.k_norm(states.key)
        states.query, states.key = rotated(states.query, states.key, *position_embeddings)

    def _call(self, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> AttentionCall:
        backend = self.config._attn_implementation
        self._check_backend(backend, kwargs)
        dropout = self.attention_dropout if self.training else 0.0
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention)
        options = {
            "attention_mask": mask,
            "dropout": dropout,
            "scaling": self.scaling,
            "sliding_window": self.sliding_window,
        }
        run = partial(interface, self, **options, **kwargs)
        plain = backend == "sdpa" and kwargs.get("cache") is None
        causal = self.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
        return AttentionCall(run, backend == "eager", mask, self.scaling, dropout, plain, causal)

    def _check_backend(self, backend: str, kwargs: dict[str, Any]) -> None:
        if backend in MASKED_HERE and kwargs.get("cache") is None:
            return
        for name, mixer in self.mixers.items():
            if mixer.needs_weights and backend not in MASKED_HERE:
                raise ValueError(
                    f"attn_implementation={backend!r} cannot run {name!r} (layer {self.layer_idx}), which needs the "
                    "attention weights: use 'sdpa' or 'eager'"
                )
            if mixer.owns_attention and kwargs.get("cache") is not None:
                raise ValueError(
                    f"continuous batching cannot run {name!r} (layer {self.layer_idx}): its paged cache is updated "
                    "inside an attention that this mechanism replaces; use generate()"
                )


class MixedLlamaAttention(MixedAttention, LlamaAttention):  # type: ignore[misc]  # positions are required
    """Llama's attention with mechanisms."""


class MixedQwen2Attention(MixedAttention, Qwen2Attention):
    """Qwen2's attention with mechanisms."""


class MixedQwen3Attention(MixedAttention, Qwen3Attention):
    """Qwen3's attention with mechanisms."""


class MixedQwen3MoeAttention(MixedAttention, Qwen3MoeAttention):
    """Qwen3-MoE's attention with mechanisms."""
