"""Multi-head Explicit Attention (MEA): keys and values as scalar combinations of component heads.

`K_i = sum_j C_ij B_j`: `h` key (value) heads from `h'` component heads, the same scalars for every token and feature.
The cache holds the components. RoPE commutes with the combination, so cached components are rotated already. A
per-head norm on keys (Qwen3) does not commute; there the cache holds the rotated `w * B_j` and, per token and
combined head, the number `1 / rms(sum_j C_ij B_j)`. With fewer components than heads the layer starts as grouped
attention over `h'` heads, with as many as heads it starts as it was. `norm` is an RMSNorm over each head's output;
it is not neutral, so it is off in a conversion.

For a query or few, as in decoding, the combined heads are not made: `explicit_decode.py` attends to components.

Paper: "Explicit Multi-head Attention for Inter-head Interaction in Large Language Models", sections 4.1 and 4.2.
"""

from typing import ClassVar, cast

import torch
from torch import nn
from transformers import initialization as init

from .explicit_decode import Components, attend_to_components
from .mixer import (
    Attended,
    AttentionCall,
    CallSizes,
    HeadLayout,
    HeadStates,
    Mixer,
    MixerLeaf,
    Settings,
    weight_count,
)
from .normed_projection import keeps_less, normed_projection
from .numerics import HeadRMSNorm, inverse_rms
from .options import Count, Flag, Option, Subset
from .regroup import regrouping

FOLDED_ROWS = 16
"""Up to how many queries that share a combined head, over heads and tokens, its components are attended to as such.

Products grow with them and combining does not: with 4, it takes 8 times as long (CPU, 8192 keys, 4 components)."""
FOLDED_TOKENS = 2
"""So many tokens are worth it where query heads do not share keys, and as many as there are sharers where they do."""


class HeadCombination(MixerLeaf):
    """The scalars `C` (heads x components)."""

    def __init__(self, heads: int, components: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, components))

    def initialise(self, std: float) -> None:
        """Each head starts as one component; neighbours share one where there are fewer."""
        init.copy_(self.weight, regrouping(*self.weight.shape).to(self.weight))

    def forward(self, components: torch.Tensor | None) -> torch.Tensor:
        """(B, components, S, d) -> (B, heads, S, d), or the scalars themselves where there is nothing to combine."""
        return self.weight if components is None else torch.einsum("ij,bjsd->bisd", self.weight, components)


class Explicit(Mixer):
    """Combinations for keys and values, and the norm over head outputs."""

    options: ClassVar[dict[str, Option]] = {
        "on": Subset(("key", "value")),
        "key_heads": Count(),
        "value_heads": Count(),
        "norm": Flag(True),
    }
    key: HeadCombination
    value: HeadCombination

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        for side in settings["on"]:
            self.add_module(side, HeadCombination(layout.key_value_heads, self.component_heads(side)))
        self.norm = HeadRMSNorm(layout.head_dim, layout.norm_eps) if settings["norm"] else None
        self.reads_side_by_side = len(settings["on"]) == 2
        self.divides_keys = layout.key_norm_eps is not None and "key" in settings["on"]

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Component heads fit the backbone; the norm meets one head's features."""
        for side in ("key", "value"):
            option, heads = f"{side}_heads", settings.get(f"{side}_heads")
            if heads is None:
                continue
            if side not in settings["on"]:
                raise ValueError(
                    f"mixers.explicit.{option}={heads} needs '{side}' in mixers.explicit.on={settings['on']!r}"
                )
            if heads > layout.key_value_heads:
                raise ValueError(
                    f"mixers.explicit.{option}={heads} is more than the model's {layout.key_value_heads} "
                    f"key/value heads: allowed are 1 to {layout.key_value_heads}"
                )
        if settings["norm"] and "differential" in layer:
            raise ValueError(
                "mixers.explicit.norm=True cannot stand beside 'differential', which norms pairs of heads itself: "
                "set mixers.explicit.norm=False"
            )

    @classmethod
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """With as many components as heads, and without the norm."""
        counts = {settings.get(f"{side}_heads") for side in settings["on"]}
        return not settings["norm"] and counts <= {None, layout.key_value_heads}

    def component_heads(self, side: str) -> int:
        """The configured count, or as many as the backbone has heads."""
        return self.settings.get(f"{side}_heads") or self.layout.key_value_heads

    def cached_numbers(self) -> int:
        """One per combined head where keys are normed."""
        return self.layout.key_value_heads if self.divides_keys else 0

    def multiplications(self, call: CallSizes) -> int:
        """The combination of all that is cached, and once more of new keys where they are normed."""
        tokens = {"key": call.keys + (call.new_keys if self.divides_keys else 0), "value": call.keys}
        size = self.layout.head_dim
        return sum(weight_count(getattr(self, side)) * size * tokens[side] for side in self.settings["on"])

    def on_settled(self, states: HeadStates) -> None:
        """Where keys are normed per head, keep each combined head's `1 / rms`."""
        eps = self.layout.key_norm_eps
        if eps is not None and "key" in self.settings["on"]:
            scale = inverse_rms(self.key(states.key), eps)  # (B, heads, S, 1)
            states.per_key["explicit.inverse_rms"] = scale.squeeze(-1).transpose(1, 2).to(states.key.dtype)

    def on_cached(self, states: HeadStates) -> None:
        """Combine components into heads."""
        for side in self.settings["on"]:
            setattr(states, side, getattr(self, side)(getattr(states, side)))
        scale = states.per_key.get("explicit.inverse_rms")
        if scale is not None:
            states.key = states.key * scale.transpose(1, 2).unsqueeze(-1).to(states.key.dtype)

    def attend_cached(self, states: HeadStates, call: AttentionCall) -> Attended | None:
        """Without combining, for a query or few: `explicit_decode.py` says how."""
        query, groups = states.query, self.layout.key_value_heads
        shared, tokens = query.shape[1] // groups, query.shape[2]
        rows = shared * tokens
        many = rows > FOLDED_ROWS or tokens > max(FOLDED_TOKENS, shared)
        masked = call.mask is not None or tokens == 1
        if many or not masked or not call.plain or call.dropout or torch.is_autocast_enabled(query.device.type):
            return None
        scalars = {side: getattr(self, side)(None) for side in self.settings["on"]}
        scale = states.per_key.get("explicit.inverse_rms")  # (B, S, h)
        output = attend_to_components(
            (query * call.scaling).reshape(len(query), groups, rows, -1),
            Components(states.key, scalars.get("key")),
            Components(states.value, scalars.get("value")),
            None if scale is None else scale.transpose(1, 2).unsqueeze(2),
            call.mask,
        )
        return output.reshape(query.shape).transpose(1, 2), None

    def on_output(self, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Norm each head's output."""
        return output if self.norm is None else self.norm(output)

    def project_out(self, projection: nn.Module, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Norm and project in one step where that keeps less for the backward pass."""
        if self.norm is not None and keeps_less(projection, self.norm):
            return normed_projection(output, self.norm.weight, self.norm.eps, cast(nn.Linear, projection))
        return super().project_out(projection, output, states)
