"""Knocking-Heads (KHA): one map, shared by all heads, on each head's projected values, queries or keys.

linear: `v_i T`; mlp: `2 (v_i U * sigmoid(v_i G)) D`; gate: `2 v_i * sigmoid(v_i G)`. `T`, `U`, `D` start as the
identity and `G` as zero: the model starts with the outputs of the stock one. The map precedes QK-norm and RoPE, so
the cache holds mapped heads and every attention backend works. With `explicit`, components are mapped, then
combined. The gate form and the random start lower quality in the paper; they are here for the comparison.

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
        """Each head is mapped by itself."""
        return True

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """From the identity."""
        return settings["init"] == "identity"


class GateKnock(nn.Module):
    """`2 x * sigmoid(x G)`."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__()
        self.gate = LinearMap(size, size, "zero" if start == "identity" else start)

    def forward(self, x: Tensor) -> Tensor:
        """Gate each feature of each head."""
        return 2 * x * torch.sigmoid(self.gate(x))


class MlpKnock(GateKnock):
    """`2 (x U * sigmoid(x G)) D`."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__(size, start)
        self.up = LinearMap(size, size, start)
        self.down = LinearMap(size, size, start)

    def forward(self, x: Tensor) -> Tensor:
        """Map each head through the shared MLP."""
        return self.down(2 * self.up(x) * torch.sigmoid(self.gate(x)))


class Knocking(Mechanism):
    """One shared map for each of the chosen queries, keys and values."""

    rules = KnockingRules

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        form, start = settings["form"], settings["init"]
        for side in settings["on"]:
            size = layout.value_dim if side == "value" else layout.head_dim
            gated = MlpKnock if form == "mlp" else GateKnock
            self.add_module(side, LinearMap(size, size, start) if form == "linear" else gated(size, start))

    def before_rope(self, state: AttentionState) -> None:
        """Map the heads of each chosen side; values that are expanded from the cache are mapped after it."""
        late = {"value"} if self.layout.latent_dim else set()
        self._map(state, [side for side in self.settings["on"] if side not in late])

    def after_cache(self, state: AttentionState) -> None:
        """Map expanded values."""
        if self.layout.latent_dim and "value" in self.settings["on"]:
            self._map(state, ["value"])

    def _map(self, state: AttentionState, sides: list[str]) -> None:
        for side in sides:
            heads = getattr(state, side).transpose(1, 2)  # (B, T, heads, d), contiguous as the projection leaves it
            setattr(state, side, getattr(self, side)(heads).transpose(1, 2))
