"""Encoder attention layer for `mixture` on CPUs, whose query and output projections also skip heads with zero gates.

Per routed head, only the tokens that select it go through the head's slices of `q_proj` and `o_proj`.
Used for inference in layers whose only mechanism is `mixture`; every other call takes the plain forward.
"""

from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from ..backends import is_plain_sdpa
from .cpu import flash_supports, is_tracing

# Measured on 2 cores of an AMD EPYC (AVX-512), one thread, float32, 12 heads of 64, 3 of them shared.
MIN_TOKENS = 192
MAX_FRACTION = 0.7
"""Maximum fraction of the heads that a token uses, shared and selected."""
EXTRAS = ("position_embeddings", "attention_mask", "past_key_values", "key_value_states", "position_bias", "cache")
"""Arguments that must be None for the fast path."""
Forward = Callable[..., tuple[Tensor, Tensor | None]]


def skipping_forward(forward: Forward) -> Forward:
    """Wrap the forward of encoder attention layers: eligible calls use `mixture_layer`, others `forward`."""

    @wraps(forward)
    def forward_or_skip(self: Any, hidden_states: Tensor, *inputs: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        is_simple = all(argument is None for argument in (*inputs, *map(kwargs.get, EXTRAS)))
        if is_simple and layer_eligible(self, hidden_states):
            gates, _ = self.mixers["mixture"](hidden_states, None)
            return mixture_layer(self, hidden_states, gates.to(hidden_states.dtype)), None
        return forward(self, hidden_states, *inputs, **kwargs)

    return forward_or_skip


def layer_eligible(layer: Any, hidden: Tensor) -> bool:
    """Whether `mixture_layer` supports the layer and hidden states (B, T, hidden), and is likely to be faster."""
    if is_tracing() or layer.training or torch.is_grad_enabled() or list(layer.mixers) != ["mixture"]:
        return False
    if hidden.ndim != 3 or hidden.shape[1] < MIN_TOKENS or layer.is_causal or layer.has_key_norm:
        return False
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
    weights = [weight for linear in projections if is_plain(linear) for weight in (linear.weight, linear.bias)]
    if len(weights) != 2 * len(projections) or any(weight is None for weight in weights):
        return False
    mixture, heads = layer.mixers["mixture"], layer.q_proj.out_features // layer.head_dim
    if mixture.routed is None or mixture.shared_heads + mixture.selected_heads > MAX_FRACTION * heads:
        return False
    if len({linear.weight.shape for linear in projections[:3]}) > 1:
        return False
    tensors = [weight.data for weight in weights]
    return is_plain_sdpa(layer.config._attn_implementation) and flash_supports(0.0, hidden, *tensors)


def is_plain(module: Any) -> bool:
    """Whether the module is exactly `nn.Linear`, without hooks, subclass or replaced forward."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook())


def mixture_layer(layer: Any, hidden: Tensor, gates: Tensor) -> Tensor:
    """Return the attention outputs (B, T, hidden) after `o_proj`, for gates (B, T, heads)."""
    heads, size, shared = gates.shape[-1], layer.head_dim, layer.mixers["mixture"].shared_heads
    key, value = (proj(hidden).unflatten(-1, (heads, size)).transpose(1, 2) for proj in (layer.k_proj, layer.v_proj))
    (q_weight, q_bias), o_weight, first = (layer.q_proj.weight, layer.q_proj.bias), layer.o_proj.weight, shared * size
    output: Tensor = layer.o_proj.bias.expand_as(hidden)
    if shared:
        query = functional.linear(hidden, q_weight[:first], q_bias[:first]).unflatten(-1, (shared, size))
        attended = attend(query.transpose(1, 2), key[:, :shared], value[:, :shared], layer.scaling).transpose(1, 2)
        attended = (attended * gates[..., :shared].unsqueeze(-1)).flatten(2)
        output = functional.linear(attended, o_weight[:, :first], layer.o_proj.bias)
    output = output.contiguous()
    for sequence, head in product(range(len(hidden)), range(shared, heads)):
        rows = gates[sequence, :, head].nonzero().squeeze(-1)
        features, idx = slice(head * size, (head + 1) * size), (sequence, head, None, None)
        query = torch.addmm(q_bias[features], hidden[sequence].index_select(0, rows), q_weight[features].T)
        attended = (
            attend(query[None, None], key[idx], value[idx], layer.scaling)[0, 0] * gates[sequence, rows, head, None]
        )
        output[sequence].index_add_(0, rows, attended @ o_weight[:, features].T)
    return output


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return attention outputs (B, n, T, d) without a mask."""
    return functional.scaled_dot_product_attention(query, key, value, scale=scaling)
