"""Mixture-of-Head (MoH): a router decides, per token, which head outputs count and by how much.

The first `shared_heads` always count; of the others, `active_heads - shared_heads` are selected per token. The
two_stage router has weights: `[a1, a2] = softmax(W_h x)`, shared heads get gates `a1 softmax(W_s x)`, selected
routed heads `a2 softmax(W_r x)`. The query_norm router has no weights and suits pretrained models: routed heads get
`softmax(||q_i|| / std(||q||))` over the routed heads, shared heads get 1. `gate_scale` "unit" renormalises so that a
gate is 1 on average, as the published code does; "paper" follows the formula. `gate` "binary" makes a gate 1 or 0,
with the gradient of the formula's gate; `gate_scale` does not apply to it. If every head is shared, gates are
`softmax(W_s x)`, in "unit" scale times the number of heads, and the layer has no part in the balance loss.

By construction, these get no gradient: `W_s` with one shared head (a softmax over one), `W_r` with one routed head,
and, except from the balance loss, `W_r` with one selected head in "unit" scale, whose gate is always `2 a2`.

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
        """Set the default of `shared_heads`: half of the active heads, rounded down."""
        active = options["active_heads"]
        half = [count // 2 for count in active] if isinstance(active, list) else active // 2
        return {"shared_heads": half} | options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Check the head counts and the router."""
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

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """True for two_stage, where each process uses its own gates; query_norm compares the queries of all heads."""
        return settings["router"] == "two_stage"

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """True if all heads are active with binary gates: every gate is 1."""
        return settings["active_heads"] == layout.output_heads and settings["gate"] == "binary"


class RouterMap(LinearMap):
    """Linear router: hidden states (B, T, hidden) -> probabilities (B, T, heads)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the softmax of the router logits, in the widened dtype."""
        return functional.linear(hidden_states, self.weight).softmax(-1, dtype=widened(hidden_states.dtype))


def query_norm_scores(query: Tensor) -> Tensor:
    """Return the softmax over heads of `||q_i|| / std(||q||)`: queries (B, H, T, d) -> (B, T, H)."""
    norms = torch.linalg.vector_norm(query.to(widened(query.dtype)), dim=-1).transpose(1, 2)
    # Equal norms have a variance of zero, where the gradient of the square root is infinite.
    spread = norms.var(dim=-1, keepdim=True).clamp_min(1e-12).sqrt()
    return functional.softmax(norms / spread, dim=-1)


def straight_through(hard: Tensor, score: Tensor) -> Tensor:
    """Return exactly `hard`, with the gradient of `score` where it is 1."""
    return hard + hard * (score - score.detach())


class Mixture(Mechanism):
    """The router of one layer; it computes gates (B, T, heads) and probabilities (B, T, routed heads)."""

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
        """Return gates and probabilities from hidden states (B, T, hidden) or, in query_norm, queries (B, H, T, d)."""
        routed, shared, balance = self.routed, self.shared, self.balance
        if self.settings["router"] == "query_norm":
            probabilities = query_norm_scores(query[:, self.shared_heads :])
        else:
            probabilities = routed(hidden_states) if routed else hidden_states[..., :0]
        top = probabilities.topk(self.selected_heads, dim=-1)
        shared_factor, routed_factor = (1.0, 1.0) if balance is None else balance(hidden_states).chunk(2, dim=-1)
        shared_gates = probabilities.new_ones(*probabilities.shape[:-1], self.shared_heads)
        if shared is not None:
            shared_gates = shared_factor * shared(hidden_states)
        if self.settings["gate"] == "binary":
            selected = torch.zeros_like(probabilities).scatter(-1, top.indices, 1.0)
            routed_gates = straight_through(selected, routed_factor * probabilities)
            shared_gates = straight_through(torch.ones_like(shared_gates), shared_gates)
            return torch.cat([shared_gates, routed_gates], dim=-1), probabilities
        top_gates, unit = top.values, self.settings["gate_scale"] == "unit"
        if unit:
            top_gates = top_gates / top_gates.mean(-1, keepdim=True)
            shared_gates = shared_gates * (1 if shared is None else self.shared_heads)
        routed_gates = torch.zeros_like(probabilities).scatter(-1, top.indices, top_gates * routed_factor)
        gates = torch.cat([shared_gates, routed_gates], dim=-1)
        return (2 * gates if unit and balance is not None else gates), probabilities

    def before_rope(self, state: AttentionState) -> None:
        """Compute gates from hidden states, or from queries before QK-norm and RoPE."""
        state.gates, state.router_scores = self(state.hidden_states, state.query)

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Choose "crosshead_mixture", which may skip heads whose gate is zero."""
        is_mixture = str(implementation).startswith("crosshead_mixture")
        if not is_plain_sdpa(implementation) or (state.query.shape[2] == 1 and not is_mixture):
            return None
        shared, active = self.shared_heads, self.shared_heads + self.selected_heads
        state.attention_kwargs = {"gates": state.gates, "shared_heads": shared, "active_heads": active}
        return implementation if is_mixture else "crosshead_mixture"

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Return each head's output multiplied by its gate."""
        if state.gates is None:
            raise RuntimeError("mixture has no gates: before_rope was not called for this state")
        return output * local_heads(state.gates, output.shape[2]).unsqueeze(-1).to(output.dtype)

    @classmethod
    def auxiliary_loss(cls, outputs: Any, config: Any, attention_mask: Tensor | None) -> AuxiliaryLoss | None:
        """Return the balance loss with its weight, or None if no layer routes."""
        scores = [score for score in outputs.get("head_router_scores") or () if score.shape[-1]]
        if not scores:
            return None
        layers = map(config.mixers_of_layer, range(len(config.layouts())))
        # Counts come from the config, because wrappers such as peft's hold copies of the modules.
        routing = [layer["mixture"] for layer in layers if "mixture" in layer]
        selected = [settings["active_heads"] - settings["shared_heads"] for settings in routing]
        selected = [count for count in selected if count]
        if len(selected) != len(scores):
            raise ValueError(
                f"the model recorded head router scores of {len(scores)} layers, but its config routes in "
                f"{len(selected)}: for a truncated model, set num_hidden_layers and mixers.mixture.layers accordingly"
            )
        value = balance_loss(scores, selected, attention_mask)
        return AuxiliaryLoss("balance_loss", value, config.mechanisms()["mixture"]["balance_weight"])


def balance_loss(scores: Sequence[Tensor], selected: Sequence[int], attention_mask: Tensor | None) -> Tensor:
    """Return the mean over layers of `sum_i P_i f_i`, a sum over the routed heads of a layer.

    `P_i` is a head's mean probability, `f_i` the fraction of tokens that select it. `scores` (B, T, routed heads) and
    `selected`, the number of selected heads, have one entry per layer. A mask (B, T) excludes padding from both means.
    """
    losses = []
    for probabilities, count in zip(scores, selected, strict=True):
        tokens = token_weights(probabilities, attention_mask).unsqueeze(-1)
        chosen = probabilities.topk(count, dim=-1).indices
        frequency = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        # Sums, not matrix products, which autocast would run in half precision.
        mean_probability = (tokens * probabilities).sum((0, 1))
        mean_frequency = (tokens * frequency).sum((0, 1))
        losses.append((mean_probability * mean_frequency).sum().to(scores[0].device))
    return torch.stack(losses).mean()


def token_weights(scores: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the weight of each token (B, T) in a mean over tokens: zero for padding."""
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
    """Attention of all heads, without applying the gates (B, T, H). crosshead's kernels skip heads with gate zero."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


register_backend("crosshead_mixture", mixture_attention_forward)
