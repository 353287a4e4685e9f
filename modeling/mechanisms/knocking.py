"""Knocking-Heads (KHA): one map, shared by all heads, is applied to each head's projected value, query or key.

linear: `v_i T`; mlp: `2 (v_i U * sigmoid(v_i G)) D`; gate: `2 v_i * sigmoid(v_i G)`. `T`, `U`, `D` start as the
identity and `G` as zero: the model starts with the outputs of the stock model. The map precedes QK-norm and RoPE, so
the cache holds mapped heads and every attention backend works. With `explicit`, components are mapped, then
combined. The gate form and the random start lower quality in the paper; they are here for comparison.

Paper: "Knocking-Heads Attention", sections 3.2 and 3.3.
"""

import torch
from torch import Tensor, nn

from ..options import Choice, Subset
from .base import AttentionState, HeadLayout, LinearMap, Mechanism, Rules, Settings, package_only


class KnockingRules(Rules):
    """The options of knocking."""

    options = {
        "form": Choice(("mlp", "linear", "gate")),
        "on": Subset(("query", "key", "value"), ("value",)),
        "init": Choice(("identity", "random")),
    }

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """True: each head is mapped independently of the others."""
        return True

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """True if the maps start as the identity."""
        return settings["init"] == "identity"


class GateKnock(nn.Module):
    """The gate form: `2 x * sigmoid(x G)`."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__()
        self.gate = LinearMap(size, size, "zero" if start == "identity" else start)

    def forward(self, x: Tensor) -> Tensor:
        """Gate each feature of each head (..., d)."""
        return 2 * x * torch.sigmoid(self.gate(x))


class MlpKnock(GateKnock):
    """The mlp form: `2 (x U * sigmoid(x G)) D`."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__(size, start)
        self.up = LinearMap(size, size, start)
        self.down = LinearMap(size, size, start)

    def forward(self, x: Tensor) -> Tensor:
        """Map each head (..., d) through the shared MLP."""
        return self.down(2 * self.up(x) * torch.sigmoid(self.gate(x)))


class Knocking(Mechanism):
    """Maps heads; queries, keys and values, if in `on`, have one map each, shared by all heads."""

    rules = KnockingRules

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        form, start = settings["form"], settings["init"]
        for side in settings["on"]:
            size = layout.value_dim if side == "value" else layout.head_dim
            gated = MlpKnock if form == "mlp" else GateKnock
            self.add_module(side, LinearMap(size, size, start) if form == "linear" else gated(size, start))

    def before_rope(self, state: AttentionState) -> None:
        """Map the heads of the queries, keys and values that are in `on`."""
        for side in self.settings["on"]:
            heads = getattr(state, side).transpose(1, 2)  # (B, T, heads, d), contiguous like the projection
            setattr(state, side, getattr(self, side)(heads).transpose(1, 2))
