"""Talking-Heads: maps across heads on the attention logits and on the attention weights.

`L = P_l J` maps the logits `J` of the query heads, position bias included; mask and softmax follow, and `U = P_w W`
maps the weights `W`. Both maps start as the identity, or, if `softmax_heads` differs, as copies and averages of
neighbouring heads. Dynamic terms add maps computed from the layer's input: at the query, and at each key (cached).

"eager" returns all weights; "sdpa" works in blocks, with memory linear in the sequence; others cannot mix heads.

Paper: "Talking-Heads Attention", section 4 and appendix A.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import maybe_autocast

from ..backends import is_plain_sdpa, register_backend
from ..ops import (
    apply_mask,
    attention_logits,
    causal_mask,
    eager_attention_forward,
    head_map_init,
    weigh_values,
    widened,
)
from ..options import Integer, Subset, refuse
from .base import AttentionState, HeadLayout, LinearMap, Mechanism, ParameterModule, Rules, Settings, package_only
from .talking_blocks import talking_blocks

STAGES = ("logits", "weights")


class TalkingRules(Rules):
    """The options of talking."""

    options = {
        "on": Subset(STAGES, STAGES),
        "softmax_heads": Integer(),
        "dynamic": Subset(("query_logits", "key_logits", "query_weights", "key_weights"), (), may_be_empty=True),
    }
    replaces_attention = True

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Check that the head counts match, and that each dynamic term has a static map to be added to."""
        on, heads = settings["on"], settings.get("softmax_heads")
        if heads not in (None, layout.query_heads) and len(on) < 2:
            reason = f"with mixers.talking.on={on!r} use {layout.query_heads}, or map on both sides of the softmax"
            raise refuse("mixers.talking.softmax_heads", heads, reason)
        for name in settings["dynamic"]:
            if name.split("_")[1] not in on:
                raise refuse("mixers.talking.dynamic", name, f"mixers.talking.on={on!r} has no map that it adds to")

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """True without dynamic terms and with equal head counts: the static maps start as the identity."""
        return not settings["dynamic"] and settings.get("softmax_heads") in (None, layout.query_heads)


class HeadMap(ParameterModule):
    """A static map (to heads, from heads) across heads, the same for every query and key."""

    def __init__(self, to_heads: int, from_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(to_heads, from_heads))

    def initialise(self, std: float) -> None:
        """Start from `head_map_init`; if it copies heads (to > from), add noise, else the copies would stay equal."""
        start = head_map_init(self.weight)
        if self.weight.shape[0] > self.weight.shape[1]:
            start = start + std * torch.randn_like(start)
        init.copy_(self.weight, start.to(self.weight.dtype))

    def forward(self, like: Tensor) -> Tensor:
        """Return a copy of the map in the widened dtype of `like`."""
        return self.weight.to(widened(like.dtype), copy=True)


class DynamicHeadMap(LinearMap):
    """Computes a map (to heads, from heads) across heads from the layer's input at one token."""

    def __init__(self, hidden_size: int, to_heads: int, from_heads: int) -> None:
        super().__init__(hidden_size, to_heads * from_heads)
        self.from_heads = from_heads

    def initialise(self, std: float) -> None:
        """Start with std 0.1 / sqrt(hidden size x from heads), without which training went badly in the paper."""
        init.normal_(self.weight, mean=0.0, std=0.1 * (self.weight.shape[1] * self.from_heads) ** -0.5)


class Talking(Mechanism):
    """Static and dynamic maps across heads, on logits and on weights."""

    rules = TalkingRules

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        heads = settings.get("softmax_heads") or layout.query_heads
        self.sizes = {"logits": (heads, layout.query_heads), "weights": (layout.output_heads, heads)}
        for stage in settings["on"]:
            self.add_module(stage, HeadMap(*self.sizes[stage]))
        for name in settings["dynamic"]:
            self.add_module(name, DynamicHeadMap(layout.hidden_size, *self.sizes[name.split("_")[1]]))

    @classmethod
    def check_implementation(cls, implementation: str | None, settings: Settings) -> None:
        """Refuse implementations other than "eager", transformers' own "sdpa" and crosshead's own functions."""
        if implementation is not None and implementation != "eager" and not is_plain_sdpa(implementation):
            reason = "'talking' mixes all heads' weights: use transformers' own 'sdpa', 'eager' or 'crosshead_talking'"
            raise refuse("attn_implementation", implementation, reason)

    def before_rope(self, state: AttentionState) -> None:
        """Compute the dynamic maps of keys, to be cached with them."""
        for name in self.settings["dynamic"]:
            if name.startswith("key"):
                state.key_side_data[f"talking.{name}"] = getattr(self, name)(state.key_value_input)

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Choose talking-heads attention: in blocks, or at once for "eager"."""
        self.check_implementation(implementation, self.settings)
        maps: list[Tensor | None] = []
        for stage in STAGES:
            static = getattr(self, stage)(state.query)[None, None] if stage in self.settings["on"] else None
            term = self._dynamic(f"query_{stage}", state)
            maps += [static if static is None or term is None else static + term, self._dynamic(f"key_{stage}", state)]
        state.attention_kwargs = {"head_maps": HeadMaps(*maps), "position_bias": state.position_bias}
        state.position_bias = None
        if implementation in (None, "eager"):
            return "crosshead_talking_eager"
        return implementation if str(implementation).startswith("crosshead_talking") else "crosshead_talking"

    def _dynamic(self, name: str, state: AttentionState) -> Tensor | None:
        """Return the maps (B, tokens, to, from) of a dynamic term, or None if the term is off."""
        if name not in self.settings["dynamic"]:
            return None
        maps = state.key_side_data.get(f"talking.{name}")
        maps = getattr(self, name)(state.hidden_states) if maps is None else maps
        return maps.view(*maps.shape[:-1], *self.sizes[name.split("_")[1]]).to(widened(maps.dtype))


class HeadMaps(NamedTuple):
    """Maps of queries (B or 1, T or 1, to, from) and of keys (B, S, to, from), in the widened dtype; None: no map."""

    logits: Tensor | None
    logits_by_key: Tensor | None
    weights: Tensor | None
    weights_by_key: Tensor | None


def mix_heads(maps: Tensor | None, key_maps: Tensor | None, x: Tensor) -> Tensor:
    """Map (B, from, T, S) across heads by the sum of maps (B or 1, T or 1, to, from) and key maps (B, S, to, from)."""
    if maps is None:
        return x
    with maybe_autocast(x.device.type, enabled=False):  # logits and weights keep the widened dtype
        static = maps.shape[:2] == (1, 1)
        mixed = torch.einsum("ij,bjts->bits" if static else "btij,bjts->bits", maps[0, 0] if static else maps, x)
        return mixed if key_maps is None else mixed + torch.einsum("bsij,bjts->bits", key_maps, x)


def talking_eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    head_maps: HeadMaps | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Logits, position bias, map, mask, softmax, map, values; also returns the mapped weights (B, heads, T, S)."""
    if head_maps is None:
        return eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    logits = attention_logits(query, key, scaling)
    logits = logits if position_bias is None else logits + position_bias
    logits = mix_heads(head_maps.logits, head_maps.logits_by_key, logits.to(widened(logits.dtype)))
    weights = functional.softmax(apply_mask(logits, attention_mask), dim=-1)
    weights = mix_heads(head_maps.weights, head_maps.weights_by_key, weights).to(value.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return weigh_values(weights, value), weights


def talking_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    is_causal: bool | None = None,
    head_maps: HeadMaps | None = None,
    operator: Callable[..., Tensor] = talking_blocks,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Talking-heads in blocks; at once for one query, dropout, `torch.func`, position bias, or mask with gradient."""
    if head_maps is None:
        options = {"scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    queries, device_type = query.shape[2], query.device.type
    mask_has_grad = attention_mask is not None and attention_mask.requires_grad and torch.is_grad_enabled()
    at_once = kwargs.get("dropout") or kwargs.get("position_bias") is not None or under_torch_func()
    if queries == 1 or mask_has_grad or at_once:
        if attention_mask is None and causal and queries > 1:
            attention_mask = causal_mask(queries, key.shape[2], query.device)
        options = {"scaling": scaling, "head_maps": head_maps, **kwargs}
        return talking_eager_attention_forward(module, query, key, value, attention_mask, **options)[0], None
    autocasts = device_type != "meta" and torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocasts else value.dtype
    identity = torch.eye(query.shape[1], dtype=widened(dtype), device=query.device)[None, None]
    logits_map, weights_map = (identity if x is None else x for x in (head_maps.logits, head_maps.weights))
    maps = logits_map, head_maps.logits_by_key, weights_map, head_maps.weights_by_key
    return operator(query.to(dtype), key.to(dtype), value.to(dtype), *maps, attention_mask, scaling, causal), None


def under_torch_func() -> bool:
    """Whether a `torch.func` transform is active, which cannot differentiate the custom operator."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and not torch.compiler.is_compiling() and bool(active())


register_backend("crosshead_talking", talking_attention_forward)
register_backend("crosshead_talking_eager", talking_eager_attention_forward)
