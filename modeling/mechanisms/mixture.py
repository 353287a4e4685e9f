"""Mixture-of-Head (MoH): a router decides, per token, which head outputs count and by how much.

The first `shared_heads` always count; of the others, `active_heads - shared_heads` are selected per token. The
two_stage router has weights: `[a1, a2] = softmax(W_h x)`, shared heads get `a1 softmax(W_s x)`, selected routed
heads `a2 softmax(W_r x)`. The query_norm router has none and suits pretrained models: routed heads score
`softmax(||q_i|| / std(||q||))` over the routed heads, shared heads count once. `gate_scale` "unit" renormalises so
that a gate is 1 on average, as the published code does; "paper" follows the formula. `gate` "binary" makes a gate 1
or 0, whose gradient is that of the formula's gate; the scale does not apply to it. Where every head is shared, gates
are `softmax(W_s x)`, in "unit" scale times the number of heads, and the layer has no part in the balance loss.

What cannot learn by construction: `W_s` with one shared head (a softmax over one), `W_r` with one routed head, and,
except by the balance loss, `W_r` with one selected head in "unit" scale, whose gate is always `2 a2`.

Paper: "MoH: Multi-Head Attention as Mixture-of-Head Attention", sections 3.2 and 4.4.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..backends import is_plain_sdpa, register_backend
from ..ops import local_heads, widened
from ..options import Choice, Count, Number, refuse
from .base import AttentionState, AuxiliaryLoss, HeadLayout, LinearMap, Mechanism, Rules, Settings, package_only


class MixtureRules(Rules):
    """The options of mixture."""

    options = {
        "shared_heads": Count(minimum=0),
        "active_heads": Count(required=True),
        "router": Choice(("two_stage", "query_norm")),
        "gate": Choice(("weighted", "binary")),
        "gate_scale": Choice(("unit", "paper")),
        "balance_weight": Number(0.01),
    }

    @classmethod
    def complete(cls, options: Settings) -> Settings:
        """Half of the active heads are shared where the config does not say."""
        active = options["active_heads"]
        half = [count // 2 for count in active] if isinstance(active, list) else active // 2
        return {"shared_heads": half} | options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """There are heads to select and to select from, and no norm divides the gates away."""
        shared, active, heads = settings["shared_heads"], settings["active_heads"], layout.output_heads
        if active > heads:
            raise refuse("mixers.mixture.active_heads", active, f"use 1 to {heads}, the layer's head outputs")
        if shared > active or shared == active < heads:
            raise refuse("mixers.mixture.shared_heads", shared, f"use 0 to {active - 1} of active_heads={active}")
        if settings["router"] == "query_norm" and "differential" in layer:
            reason = "it scores single query heads, and 'differential' joins them in pairs: use 'two_stage'"
            raise refuse("mixers.mixture.router", "query_norm", reason)
        if settings["router"] == "query_norm" and heads - shared < 2:
            reason = f"router='query_norm' compares routed heads, 2 or more of {heads}: use 0 to {heads - 2}"
            raise refuse("mixers.mixture.shared_heads", shared, reason)
        names = list(layer)
        if layer.get("explicit", {}).get("norm") and names.index("mixture") < names.index("explicit"):
            reason = "it would divide the gates of mixers.mixture away: put 'explicit' first, or use False"
            raise refuse("mixers.explicit.norm", True, reason)

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """Each process takes the gates of its heads; the query_norm router compares the queries of all."""
        return settings["router"] == "two_stage"

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """Where every head counts once."""
        return settings["active_heads"] == layout.output_heads and settings["gate"] == "binary"


class RouterMap(LinearMap):
    """Router scores from hidden states."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Softmax over the logits, in the widened dtype."""
        return functional.linear(hidden_states, self.weight).softmax(-1, dtype=widened(hidden_states.dtype))


def query_norm_scores(query: Tensor) -> Tensor:
    """Softmax over heads of `||q_i|| / std(||q||)`: (B, H, T, d) -> (B, T, H)."""
    norms = torch.linalg.vector_norm(query.to(widened(query.dtype)), dim=-1).transpose(1, 2)
    # Equal norms have a spread of zero, where the gradient of the root is infinite.
    spread = norms.var(dim=-1, keepdim=True).clamp_min(1e-12).sqrt()
    return functional.softmax(norms / spread, dim=-1)


def straight_through(hard: Tensor, score: Tensor) -> Tensor:
    """`hard`, exactly; its gradient where it is 1 is the gradient of `score`."""
    return hard + hard * (score - score.detach())


class Mixture(Mechanism):
    """The router of one layer; calling it gives gates (B, T, heads) and the routed heads' probabilities."""

    rules = MixtureRules
    recorded = {"head_router_scores": 1}

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        self.shared_heads: int = settings["shared_heads"]
        self.selected_heads: int = settings["active_heads"] - self.shared_heads
        self.routed = self.shared = self.balance = None
        routed_heads = layout.output_heads - self.shared_heads
        if settings["router"] == "two_stage":
            self.routed = RouterMap(layout.hidden_size, routed_heads) if routed_heads else None
            self.shared = RouterMap(layout.hidden_size, self.shared_heads) if self.shared_heads else None
            self.balance = RouterMap(layout.hidden_size, 2) if self.routed and self.shared else None

    def forward(self, hidden_states: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Gates from hidden states (B, T, hidden) or, by the query_norm router, from raw queries (B, H, T, d)."""
        routed, shared, balance = self.routed, self.shared, self.balance
        if self.settings["router"] == "query_norm":
            probabilities = query_norm_scores(query[:, self.shared_heads :])
        else:
            probabilities = routed(hidden_states) if routed else hidden_states[..., :0]
        chosen = probabilities.topk(self.selected_heads, dim=-1)
        first, second = (1.0, 1.0) if balance is None else balance(hidden_states).chunk(2, dim=-1)
        if shared is None:
            scores = probabilities.new_ones(*probabilities.shape[:-1], self.shared_heads)
        else:
            scores = first * shared(hidden_states)
        if self.settings["gate"] == "binary":
            selected = torch.zeros_like(probabilities).scatter(-1, chosen.indices, 1.0)
            gates = straight_through(selected, second * probabilities)
            return torch.cat([straight_through(torch.ones_like(scores), scores), gates], dim=-1), probabilities
        gates, unit = chosen.values, self.settings["gate_scale"] == "unit"
        if unit:
            gates = gates / gates.mean(-1, keepdim=True)
            scores = scores if shared is None or self.shared_heads == 1 else self.shared_heads * scores
        gates = torch.zeros_like(probabilities).scatter(-1, chosen.indices, gates * second)
        gates = torch.cat([scores, gates], dim=-1)
        return (gates + gates if unit and balance is not None else gates), probabilities

    def before_rope(self, state: AttentionState) -> None:
        """Route by the hidden states or by the raw queries."""
        state.gates, state.router_scores = self(state.hidden_states, state.query)

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Let the function skip heads whose gate is zero."""
        own = str(implementation).startswith("crosshead_mixture")
        if not is_plain_sdpa(implementation) or (state.query.shape[2] == 1 and not own):
            return None
        shared, active = self.shared_heads, self.shared_heads + self.selected_heads
        state.attention_kwargs = {"gates": state.gates, "shared_heads": shared, "active_heads": active}
        return implementation if own else "crosshead_mixture"

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Multiply each head's output by its gate."""
        if state.gates is None:
            raise RuntimeError("mixture has no gates: before_rope was not called for this state")
        return output * local_heads(state.gates, output.shape[2]).unsqueeze(-1).to(output.dtype)

    @classmethod
    def auxiliary_loss(cls, outputs: Any, config: Any, attention_mask: Tensor | None) -> AuxiliaryLoss | None:
        """The balance loss."""
        scores = [each for each in outputs.get("head_router_scores") or () if each.shape[-1]]
        if not scores:
            return None
        layers = map(config.mixers_of_layer, range(len(config.layouts())))
        # From the config: wrappers such as peft's hold copies of the modules.
        routing = [layer["mixture"] for layer in layers if "mixture" in layer]
        selected = [each["active_heads"] - each["shared_heads"] for each in routing]
        selected = [count for count in selected if count]
        if len(selected) != len(scores):
            raise ValueError(
                f"the model recorded head router scores of {len(scores)} layers, but its config routes in "
                f"{len(selected)}: for a truncated model, set num_hidden_layers and mixers.mixture.layers accordingly"
            )
        value = balance_loss(scores, selected, attention_mask)
        return AuxiliaryLoss("balance_loss", value, config.mechanisms()["mixture"]["balance_weight"])


def balance_loss(scores: Sequence[Tensor], selected: Sequence[int], attention_mask: Tensor | None) -> Tensor:
    """`sum_i P_i f_i` over a layer's routed heads, mean over the layers that select heads.

    `P_i` is a head's mean probability, `f_i` the share of tokens that select it. `scores` are (B, T, routed heads),
    `selected` is how many heads each layer selects. A mask (B, T) takes padding out of both means.
    """
    losses = []
    for probabilities, count in zip(scores, selected, strict=True):
        tokens = token_weights(probabilities, attention_mask).unsqueeze(-1)
        chosen = probabilities.topk(count, dim=-1).indices
        frequency = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        # Sums and not matrix products, which autocast would round.
        mean_probability = (tokens * probabilities).sum((0, 1))
        mean_frequency = (tokens * frequency).sum((0, 1))
        losses.append((mean_probability * mean_frequency).sum().to(scores[0].device))
    return torch.stack(losses).mean()


def token_weights(scores: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The weight of each token (B, T) in a mean: zero for padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        attention_mask = scores.new_ones(scores.shape[:2])
    if attention_mask.shape != scores.shape[:2]:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not say which of the "
            f"{tuple(scores.shape[:2])} tokens are padding: use one of that shape"
        )
    weights = attention_mask.to(scores)
    return weights / weights.sum().clamp_min(1)


def mixture_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    gates: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of all heads; the gates (B, T, H) come after it. crosshead's own function skips gates of zero."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


register_backend("crosshead_mixture", mixture_attention_forward)
