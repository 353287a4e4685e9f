"""Reference implementation of the Mixture-of-Head router with slow loops; `oracles.py` has the other mechanisms."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle_arithmetic import Options, Weights, add, linear


def routed_probabilities(token_input: Tensor, queries: list[Tensor], weights: Weights, options: Options) -> Tensor:
    """Return one token's probabilities (R,): the softmax of `W_r x`, or of query norms / their standard deviation."""
    if options["router"] == "two_stage":
        if "mixers.mixture.routed.weight" not in weights:  # every head is shared
            return token_input.new_zeros(0)
        return torch.softmax(linear(token_input, weights, "mixers.mixture.routed"), dim=0)
    if options["router"] != "query_norm":
        raise ValueError(f"mixture router is {options['router']!r}; known are 'two_stage', 'query_norm'")
    norms = torch.stack([torch.sqrt(torch.dot(query, query)) for query in queries[options["shared_heads"] :]])
    variance = ((norms - norms.mean()) ** 2).sum() / (norms.shape[0] - 1)
    return torch.softmax(norms / torch.sqrt(variance), dim=0)


def mixture(
    token_input: Tensor, queries: list[Tensor], weights: Weights, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """MoH equations 5, 6, 9, 10: one token's routed probabilities (R,), selected heads (R,) and gates (heads,).

    "paper" gates follow the equations literally; "unit" gates are rescaled to be 1 on average.
    """
    probabilities = routed_probabilities(token_input, queries, weights, options)
    shared, count = options["shared_heads"], options["active_heads"] - options["shared_heads"]
    selected = sorted(range(probabilities.shape[0]), key=lambda i: -probabilities[i].item())[:count]
    selected_sum = probabilities[selected].sum()
    zero = probabilities.new_zeros(())
    one = paper_factor = unit_factor = probabilities.new_ones(())
    paper, unit, on = [one] * shared, [one] * shared, [one] * shared
    if options["router"] == "two_stage" and shared > 0:
        shares = torch.softmax(linear(token_input, weights, "mixers.mixture.shared"), dim=0)
        if len(probabilities) > 0:
            a1, a2 = torch.softmax(linear(token_input, weights, "mixers.mixture.balance"), dim=0)
            paper, paper_factor = [a1 * share for share in shares], a2
            unit, unit_factor = [2 * a1 * share * shared for share in shares], 2 * a2
        else:  # like the published code of MoH-ViT: a weighted sum of all heads
            paper, unit = list(shares), [share * shared for share in shares]
    for i in range(probabilities.shape[0]):
        on.append(one if i in selected else zero)
        paper.append(paper_factor * probabilities[i] if i in selected else zero)
        unit.append(unit_factor * probabilities[i] / selected_sum * count if i in selected else zero)
    if options["gate"] == "binary":  # straight-through: 1 or 0 forward, the gradient of the paper's gate backward
        gates = [on[i] + (paper[i] - paper[i].detach()) for i in range(len(on))]
    else:
        gates = {"paper": paper, "unit": unit}[options["gate_scale"]]
    return probabilities, torch.stack([*on, zero])[shared:-1], torch.stack(gates)


def balance_loss(routed: list[tuple[Tensor, Tensor]], valid: Tensor) -> Tensor:
    """MoH equation 7 over the valid tokens, mean over layers, without beta.

    `routed` has the probabilities and the selected heads of each routed layer, both (B, T, R); `valid` is (B, T).
    """
    tokens = [(b, t) for b in range(valid.shape[0]) for t in range(valid.shape[1]) if bool(valid[b, t])]
    losses = []
    for probabilities, selected in routed:
        for head in range(probabilities.shape[2]):
            mean_probability = add(probabilities[b, t, head] for b, t in tokens) / len(tokens)
            frequency = add(selected[b, t, head] for b, t in tokens) / len(tokens)
            losses.append(mean_probability * frequency)
    return add(losses) / len(routed)
