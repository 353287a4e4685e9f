"""Mixture-of-Head (MoH): a router decides, per token, which head outputs count and by how much.

The first `shared_heads` always count; of the others, `active_heads - shared_heads` are selected per token. The
two_stage router has weights: `[a1, a2] = softmax(W_h x)`, shared heads get `a1 softmax(W_s x)`, selected routed heads
`a2 softmax(W_r x)`. The query_norm router has none and suits pretrained models: routed heads score
`softmax(||q_i|| / std(||q||))` over the routed heads, shared heads simply count. `gate_scale` "unit" renormalises
so that a gate is 1 on average, as the published code does; "paper" follows the formula. `gate` "binary" makes a gate
1 or 0 and passes its gradient straight through to the score, the formula's gate, of the heads that count; the scale
means nothing to it. This file computes every head and multiplies, except where skipping pays: `routed_attention.py`,
`chosen_projection.py` and, for the next token of a long text, `routed_decode.py`.

What cannot learn by construction: `W_s` with one shared head (a softmax over one), `W_r` with one routed head, and,
but for the balance loss, `W_r` with one selected head in "unit" scale, whose gate is always `2 a2`.

Paper: "MoH: Multi-Head Attention as Mixture-of-Head Attention", sections 3.2 and 4.4.
"""

from typing import ClassVar

import torch
from torch import nn

from .chosen_projection import ChosenTokens, pays_to_choose
from .mixer import (
    Attended,
    AttentionCall,
    CallSizes,
    HeadLayout,
    HeadStates,
    Mixer,
    Settings,
    weight_count,
)
from .options import Choice, Count, Number, Option
from .routed_attention import pays, routed_attention
from .routed_decode import attend_to_needed, needed_part, reads_less
from .router_scores import RouterMap, query_norm_probabilities, scores, straight_through


class Mixture(Mixer):
    """The router of one layer; calling it gives gates (B, T, heads) and the routed heads' probabilities."""

    options: ClassVar[dict[str, Option]] = {
        "shared_heads": Count(minimum=0),
        "active_heads": Count(required=True),
        "router": Choice(("two_stage", "query_norm")),
        "gate": Choice(("weighted", "binary")),
        "gate_scale": Choice(("unit", "paper")),
        "balance_weight": Number(0.01),
    }

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        self.shared_heads: int = settings["shared_heads"]
        self.selected_heads: int = settings["active_heads"] - self.shared_heads
        self.routed_heads: int = layout.output_heads - self.shared_heads
        self.needed_part = needed_part(layout, self.shared_heads, self.selected_heads)
        self.routed = self.shared = self.balance = None
        if settings["router"] == "two_stage":
            self.routed = RouterMap(layout.hidden_size, self.routed_heads)
            if self.shared_heads:
                self.shared = RouterMap(layout.hidden_size, self.shared_heads)
                self.balance = RouterMap(layout.hidden_size, 2)

    @classmethod
    def complete(cls, options: Settings) -> Settings:
        """Half of the active heads are shared where the config does not say."""
        active = options["active_heads"]
        half = [count // 2 for count in active] if isinstance(active, list) else active // 2
        return {"shared_heads": half} | options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """There is something to select, to select from, and nothing behind that undoes it."""
        shared, active, heads = settings["shared_heads"], settings["active_heads"], layout.output_heads
        if active > heads:
            raise ValueError(
                f"mixers.mixture.active_heads={active} is more than the layer's {heads} head outputs: "
                f"allowed are 1 to {heads}"
            )
        if shared >= active:
            raise ValueError(
                f"mixers.mixture.shared_heads={shared} leaves nothing to route among active_heads={active}: "
                f"allowed are 0 to {active - 1}"
            )
        if settings["router"] == "query_norm":
            cls._check_query_norm(heads - shared, layer)
        order = list(layer)
        if layer.get("explicit", {}).get("norm") and order.index("mixture") < order.index("explicit"):
            raise ValueError(
                "mixers.mixture before mixers.explicit with norm=True: the norm over head outputs would divide the "
                "gates away; put 'explicit' first or set mixers.explicit.norm=False"
            )

    @classmethod
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """Where every head counts once."""
        return settings["active_heads"] == layout.output_heads and settings["gate"] == "binary"

    @staticmethod
    def _check_query_norm(routed: int, layer: dict[str, Settings]) -> None:
        if "differential" in layer:
            raise ValueError(
                "mixers.mixture.router='query_norm' scores single query heads, but 'differential' joins them in "
                "pairs: use router='two_stage'"
            )
        if routed < 2:
            raise ValueError(
                f"mixers.mixture.router='query_norm' compares the routed heads with each other and has {routed} of "
                "them: allowed are 2 or more; lower shared_heads"
            )

    def forward(self, hidden: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates from hidden states (B, T, hidden) or, by the query_norm router, from raw queries (B, H, T, d)."""
        if self.routed is None:
            probabilities = query_norm_probabilities(query[:, self.shared_heads :])
        else:
            probabilities = scores(self.routed, hidden)
        chosen = probabilities.topk(self.selected_heads, dim=-1).indices
        selected = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        shared, routed_weight = self._shared(hidden, probabilities)
        if self.settings["gate"] == "binary":
            routed = straight_through(selected, routed_weight * probabilities)
            shared = straight_through(torch.ones_like(shared), shared)
        elif self.settings["gate_scale"] == "paper":
            routed = routed_weight * probabilities * selected
        else:
            kept = probabilities * selected
            routed = routed_weight * self.selected_heads * kept / kept.sum(-1, keepdim=True)
            if self.balance is not None:
                routed, shared = 2 * routed, 2 * self.shared_heads * shared
        return torch.cat([shared, routed], dim=-1), probabilities

    def _shared(self, hidden: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The shared heads' scores (B, T, shared) and the factor on the routed ones'."""
        if self.shared is None or self.balance is None:
            return like.new_ones(*like.shape[:-1], self.shared_heads), 1.0
        first, second = scores(self.balance, hidden).split(1, dim=-1)
        return first * scores(self.shared, hidden), second

    def multiplications(self, call: CallSizes) -> int:
        """The routers; heads that do not count are computed all the same."""
        return weight_count(self) * call.queries

    def on_hidden(self, states: HeadStates) -> None:
        """Route as soon as that can be."""
        if self.routed is not None:
            states.gates, states.router_scores = self(states.hidden, states.query)

    def on_projected(self, states: HeadStates) -> None:
        """Route before the queries are normed and rotated."""
        if states.gates is None:
            states.gates, states.router_scores = self(states.hidden, states.query)

    def chosen_tokens(self, projection: nn.Module, states: HeadStates, call: AttentionCall) -> ChosenTokens | None:
        """What the router chose, but where the weights of all heads are wanted."""
        if states.gates is None or not call.plain or not pays_to_choose(projection, states.hidden, self._share):
            return None
        return ChosenTokens(states.gates.flatten(0, 1) != 0, self.shared_heads)

    @property
    def _share(self) -> float:
        """Of the heads that count for a token."""
        return self.settings["active_heads"] / self.layout.output_heads

    def attend(self, states: HeadStates, call: AttentionCall) -> Attended | None:
        """By the queries that count alone, where that is sooner."""
        if states.gates is None:
            return None
        heads = states.query, states.key, states.value
        if reads_less(states.query, states.key, self.needed_part, call):
            output = attend_to_needed(*heads, states.gates != 0, call)
            return None if output is None else (output, None)
        if not pays(states.query, states.key, self._share, call):
            return None
        return routed_attention(*heads, states.gates != 0, self.shared_heads, call), None

    def on_output(self, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Weigh each head's output."""
        if states.gates is None:
            raise RuntimeError("mixture has no gates: on_projected was not called for these states")
        return output * states.gates.unsqueeze(-1).to(output.dtype)
