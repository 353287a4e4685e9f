"""Knocking-Heads (KHA): one map, shared by all heads, on each head's projected values, queries or keys.

linear: `v_i T`; mlp: `2 (v_i U * sigmoid(v_i G)) D`; gate: `2 v_i * sigmoid(v_i G)`. `T`, `U`, `D` start as the
identity and `G` as zero, so that a model starts exactly as it was. The map comes before QK-norm and RoPE, so the
cache holds mapped heads and attention itself is untouched: every backend works. The linear form is folded into the
projection where that pays and this mechanism is the layer's first (`folded_projection.py`). With `explicit`, whichever
of the two comes first in the config, components are mapped and then combined, since the cache holds components. The
gate form lowers quality in the paper and is here for the comparison; so is the random start.

Paper: "Knocking-Heads Attention", sections 3.2 and 3.3.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .knocking_fused import FusedMlpKnock
from .mixer import CallSizes, HeadLayout, HeadStates, LinearLeaf, Mixer, Settings, weight_count
from .options import Choice, Option, Subset
from .traced import traced


class SharedMap(LinearLeaf):
    """A square map, applied to every head alike."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__(size, size)
        self.start = start

    def initialise(self, std: float) -> None:
        """Start as the identity, as zero, or at random."""
        if self.start == "identity":
            init.eye_(self.weight)
        elif self.start == "zero":
            init.zeros_(self.weight)
        else:
            init.normal_(self.weight, mean=0.0, std=std)


class LinearKnock(SharedMap):
    """`x T`."""


class GateKnock(nn.Module):
    """`2 x * sigmoid(x G)`."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__()
        self.gate = SharedMap(size, "zero" if start == "identity" else start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate each feature of each head."""
        return 2 * x * torch.sigmoid(self.gate(x))


class MlpKnock(GateKnock):
    """`2 (x U * sigmoid(x G)) D`."""

    def __init__(self, size: int, start: str) -> None:
        super().__init__(size, start)
        self.up = SharedMap(size, start)
        self.down = SharedMap(size, start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map each head through the shared MLP."""
        if torch.is_grad_enabled() and not traced():  # a compiler fuses the plain form itself
            return self._fused(x)
        return self._plain(x)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(2 * self.up(x) * torch.sigmoid(self.gate(x)))

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        """The same; each weight is what its module makes of the identity, for it may be read in its own call alone."""
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        up, gate, down = self.up(identity), self.gate(identity), self.down(identity)
        return FusedMlpKnock.apply(x.to(up.dtype), torch.cat([up, gate], dim=1), down)


FORMS: dict[str, type[nn.Module]] = {"mlp": MlpKnock, "linear": LinearKnock, "gate": GateKnock}


class Knocking(Mixer):
    """One shared map per target among queries, keys and values."""

    options: ClassVar[dict[str, Option]] = {
        "form": Choice(tuple(FORMS)),
        "on": Subset(("query", "key", "value"), default=("value",)),
        "init": Choice(("identity", "random")),
    }

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        for target in settings["on"]:
            self.add_module(target, FORMS[settings["form"]](layout.head_dim, settings["init"]))

    @classmethod
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """From the identity."""
        return settings["init"] == "identity"

    def multiplications(self, call: CallSizes) -> int:
        """Each head of each new token goes through its target's maps."""
        heads = {
            "query": self.layout.query_heads * call.queries,
            "key": call.key_heads * call.new_keys,
            "value": call.value_heads * call.new_keys,
        }
        return sum(heads[target] * weight_count(knock) for target, knock in self.named_children())

    def linear_map(self, side: str) -> nn.Module | None:
        """The linear form of a target."""
        return getattr(self, side) if self.settings["form"] == "linear" and side in self.settings["on"] else None

    def on_projected(self, states: HeadStates) -> None:
        """Map the heads of each target."""
        for target in self.settings["on"]:
            if target not in states.folded:
                heads = getattr(states, target).transpose(1, 2)  # (B, T, heads, d), as the projection leaves it
                setattr(states, target, getattr(self, target)(heads).transpose(1, 2))
