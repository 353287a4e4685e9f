"""Talking-Heads: maps across heads on the attention logits and on the attention weights.

`L = P_l J` over the query/key heads' logits, mask, softmax, `U = P_w W`, then values. The mask comes after the first
map, never before. Both maps start as the identity (as copies and averages of neighbours where `softmax_heads` differs
from the number of heads). Dynamic terms add maps made from the query's input and from each key's input; the latter
are cached beside the keys.

The backend "eager" materialises all weights and returns them. "sdpa" works in blocks (`talking_blocks`; where asked
for on a GPU, forward, in `talking_triton`), in memory that grows linearly with the sequence, but for a single query
and for dropout in training, which take the plain way. Others have masks of their own and are refused.

Paper: "Talking-Heads Attention", section 4 and appendix A.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .eager import attention_logits, weigh_values
from .mixer import (
    Attended,
    AttentionCall,
    CallSizes,
    HeadLayout,
    HeadStates,
    LinearLeaf,
    Mixer,
    MixerLeaf,
    Settings,
    weight_count,
)
from .numerics import apply_mask, widened
from .options import Integer, Option, Subset
from .regroup import regrouping
from .talking_operator import talking_attention
from .traced import transformed

STAGES = ("logits", "weights")
DYNAMIC = tuple(f"{source}_{stage}" for stage in STAGES for source in ("query", "key"))


class HeadMap(MixerLeaf):
    """A map across heads (to x from), the same for every query and key."""

    def __init__(self, to_heads: int, from_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(to_heads, from_heads))

    def initialise(self, std: float) -> None:
        """Start as the regrouping of heads; copies get noise, or they would stay copies for ever."""
        start = regrouping(*self.weight.shape)
        if self.weight.shape[0] > self.weight.shape[1]:
            start = start + std * torch.randn(start.shape, dtype=start.dtype)
        init.copy_(self.weight, start.to(self.weight))

    def forward(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix, in the widened dtype of a tensor."""
        return self.weight.to(widened(like.dtype))


class DynamicHeadMap(LinearLeaf):
    """A map across heads (to x from) made from a token's input."""

    def __init__(self, hidden_size: int, to_heads: int, from_heads: int) -> None:
        super().__init__(hidden_size, to_heads * from_heads)
        self.from_heads = from_heads

    def initialise(self, std: float) -> None:
        """Start small: the paper trains well only with 0.1 / sqrt(hidden size x heads mapped from)."""
        init.normal_(self.weight, mean=0.0, std=0.1 * (self.weight.shape[1] * self.from_heads) ** -0.5)


class Talking(Mixer):
    """Static and dynamic maps on logits and weights."""

    options: ClassVar[dict[str, Option]] = {
        "on": Subset(STAGES),
        "softmax_heads": Integer(),
        "dynamic": Subset(DYNAMIC, default=(), may_be_empty=True),
    }
    owns_attention = True
    needs_weights = True

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        softmax_heads = settings.get("softmax_heads") or layout.query_heads
        self.sizes = {"logits": (softmax_heads, layout.query_heads), "weights": (layout.output_heads, softmax_heads)}
        for stage in settings["on"]:
            self.add_module(stage, HeadMap(*self.sizes[stage]))
        for name in settings["dynamic"]:
            self.add_module(name, DynamicHeadMap(layout.hidden_size, *self.sizes[name.split("_")[1]]))

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Head counts meet, and dynamic terms have a static map to add to."""
        on, heads = settings["on"], settings.get("softmax_heads")
        if heads not in (None, layout.query_heads) and set(on) != set(STAGES):
            raise ValueError(
                f"mixers.talking.softmax_heads={heads} needs a map on both sides of the softmax, but "
                f"mixers.talking.on={on!r}: allowed is {layout.query_heads}, or on={list(STAGES)!r}"
            )
        for name in settings["dynamic"]:
            if name.split("_")[1] not in on:
                raise ValueError(
                    f"mixers.talking.dynamic={name!r} adds to the static map of {name.split('_')[1]!r}, which "
                    f"mixers.talking.on={on!r} does not have"
                )

    @classmethod
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """Static maps between equal head counts start as the identity."""
        return not settings["dynamic"] and settings.get("softmax_heads") in (None, layout.query_heads)

    def cached_numbers(self) -> int:
        """The keys' maps."""
        return sum(getattr(self, name).weight.shape[0] for name in self.settings["dynamic"] if name.startswith("key"))

    def multiplications(self, call: CallSizes) -> int:
        """Static and dynamic maps on every pair of query and key, and the making of the dynamic ones."""
        pairs = call.queries * call.keys
        total = sum(weight_count(getattr(self, stage)) * pairs for stage in self.settings["on"])
        for name in self.settings["dynamic"]:
            made, tokens = getattr(self, name), call.queries if name.startswith("query") else call.new_keys
            total += weight_count(made) * tokens + made.weight.shape[0] * pairs
        return total

    def learnt(self) -> dict[str, torch.Tensor]:
        """The maps, and what both make of a head where the softmax between them is left out."""
        matrices = super().learnt()
        if set(self.settings["on"]) == set(STAGES):
            matrices["weights x logits"] = matrices["weights"] @ matrices["logits"]
        return matrices

    def on_projected(self, states: HeadStates) -> None:
        """Make the keys' maps, which the cache keeps."""
        for name in self.settings["dynamic"]:
            if name.startswith("key"):
                states.per_key[f"talking.{name}"] = getattr(self, name)(states.memory)

    def attend(self, states: HeadStates, call: AttentionCall) -> Attended:
        """Logits, map, mask, softmax, map, values."""
        if call.eager:
            return self._attend_plainly(states, call, call.mask)
        queries, keys = states.query.shape[2], states.key.shape[2]
        if queries > 1 and not call.dropout and not transformed():
            return self._attend_in_blocks(states, call), None
        mask = call.mask
        if mask is None and call.causal and queries > 1:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=states.query.device).tril()
        return self._attend_plainly(states, call, mask)[0], None

    def _attend_plainly(self, states: HeadStates, call: AttentionCall, mask: torch.Tensor | None) -> Attended:
        logits = attention_logits(states.query, states.key, call.scaling)
        logits = apply_mask(self._mix("logits", logits.to(widened(logits.dtype)), states), mask)
        weights = self._mix("weights", functional.softmax(logits, dim=-1), states).to(states.value.dtype)
        weights = functional.dropout(weights, p=call.dropout, training=self.training)
        return weigh_values(weights, states.value), weights

    def _mix(self, stage: str, maps: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """The static map, plus the dynamic ones: (B, from, T, S) -> (B, to, T, S)."""
        if stage not in self.settings["on"]:
            return maps
        per_token = {
            "btij,bjts->bits": self._dynamic(f"query_{stage}", states),
            "bsij,bjts->bits": self._dynamic(f"key_{stage}", states),
        }
        with maybe_autocast(maps.device.type, enabled=False):  # logits and weights stay wide
            mixed = torch.einsum("ij,bjts->bits", getattr(self, stage)(maps), maps)
            for equation, made in per_token.items():
                if made is not None:
                    mixed = mixed + torch.einsum(equation, made, maps)
        return mixed

    def _dynamic(self, name: str, states: HeadStates) -> torch.Tensor | None:
        """The maps (B, tokens, to, from) that a dynamic term adds; None where it is off."""
        if name not in self.settings["dynamic"]:
            return None
        flat = getattr(self, name)(states.hidden) if name.startswith("query") else states.per_key[f"talking.{name}"]
        return flat.view(*flat.shape[:-1], *self.sizes[name.split("_")[1]]).to(widened(flat.dtype))

    def _attend_in_blocks(self, states: HeadStates, call: AttentionCall) -> torch.Tensor:
        kind = states.value.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.value.dtype
        heads = [x.to(dtype) for x in (states.query, states.key, states.value)]
        maps = [
            x
            for stage in STAGES
            for x in (self._query_map(stage, states, heads[0]), self._dynamic(f"key_{stage}", states))
        ]
        return talking_attention(*heads, *maps, call.mask, call.scaling, call.causal)

    def _query_map(self, stage: str, states: HeadStates, like: torch.Tensor) -> torch.Tensor:
        """(B or 1, T or 1, to, from): the static map, the identity where there is none, plus those of the queries."""
        if stage not in self.settings["on"]:
            return torch.eye(self.layout.query_heads, dtype=widened(like.dtype), device=like.device)[None, None]
        static, made = getattr(self, stage)(like)[None, None], self._dynamic(f"query_{stage}", states)
        return static if made is None else static + made
