"""Multi-head latent attention and grouped tied attention as slow loops, with the mechanisms of `oracles.py`.

Written from the papers: "DeepSeek-V2", equations 9 to 19, and "Hardware-Efficient Attention for Fast Decoding",
section 3.3. Nothing is vectorised over batch, tokens or heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle_arithmetic import Heads, LayerShape, Mixers, Weights, linear, rms_norm
from oracles import knocking, read_out

LATENT_EPS = 1e-6
"""Of the norms on compressed vectors, whatever the config says of the others."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of MLA, and whether positions rotate neighbouring features or the two halves."""

    latent: int
    plain: int
    """Features of a query or key head without positions."""
    value: int
    neighbours: bool


def turned(vector: Tensor, angles: Tensor, neighbours: bool) -> Tensor:
    """Each pair of features turned by its angle."""
    count = len(angles)
    places = [(2 * i, 2 * i + 1) if neighbours else (i, i + count) for i in range(count)]
    out = [vector[0]] * len(vector)
    for (first, second), angle in zip(places, angles, strict=True):
        out[first] = vector[first] * torch.cos(angle) - vector[second] * torch.sin(angle)
        out[second] = vector[first] * torch.sin(angle) + vector[second] * torch.cos(angle)
    return torch.stack(out)


def mapped_queries(projected: Heads, weights: Weights, mixers: Mixers) -> tuple[Heads, Heads]:
    """Queries after knocking, and those that a router sees: before it, where `mixture` comes first."""
    router_queries = projected
    for name, options in mixers.items():
        if name == "knocking":
            projected = [[knocking(v, "query", weights, options) for v in token] for token in projected]
        if name == "mixture":
            router_queries = projected
    return projected, router_queries


def with_positions(vector: Tensor, plain: int, angles: Tensor, neighbours: bool) -> Tensor:
    """A query or key whose features after the first `plain` are turned."""
    return torch.cat([vector[:plain], turned(vector[plain:], angles, neighbours)])


def latent_sequence(
    inputs: Tensor,
    weights: Weights,
    shape: LayerShape,
    sizes: LatentSizes,
    mixers: Mixers,
    angles: Tensor,
    allowed: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """MLA on one sequence (T, hidden); `angles` are (T, rotated features / 2)."""
    queries, keys, values, compressed = [], [], [], []
    for t, token in enumerate(inputs):
        if "q_proj.weight" in weights:
            query = linear(token, weights, "q_proj")
        else:
            low = rms_norm(linear(token, weights, "q_a_proj"), LATENT_EPS, weights["q_a_layernorm.weight"])
            query = linear(low, weights, "q_b_proj")
        queries.append(list(query.split(shape.head_dim)))
        both = linear(token, weights, "kv_a_proj_with_mqa")
        compressed.append(both)
        latent = rms_norm(both[: sizes.latent], LATENT_EPS, weights["kv_a_layernorm.weight"])
        shared = turned(both[sizes.latent :], angles[t], sizes.neighbours)
        of_heads = linear(latent, weights, "kv_b_proj").split(sizes.plain + sizes.value)
        keys.append([torch.cat([head[: sizes.plain], shared]) for head in of_heads])
        values.append([head[sizes.plain :] for head in of_heads])
    queries, router_queries = mapped_queries(queries, weights, mixers)
    queries = [[with_positions(q, sizes.plain, angles[t], sizes.neighbours) for q in x] for t, x in enumerate(queries)]
    if "knocking" in mixers:
        values = [[knocking(v, "value", weights, mixers["knocking"]) for v in token] for token in values]
    sides = {"query": queries, "key": keys, "value": values}
    return read_out(inputs, torch.stack(compressed), sides, router_queries, weights, shape, mixers, allowed)


def tied_sequence(
    inputs: Tensor, weights: Weights, shape: LayerShape, mixers: Mixers, angles: Tensor, allowed: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """GTA on one sequence: the tied states are values, and their first halves the first halves of keys."""
    half = shape.head_dim // 2
    projected, keys, values = [], [], []
    for t, token in enumerate(inputs):
        projected.append(list(linear(token, weights, "q_proj").split(shape.head_dim)))
        tied = list(linear(token, weights, "v_proj").split(shape.head_dim))
        if "knocking" in mixers:
            tied = [knocking(state, "value", weights, mixers["knocking"]) for state in tied]
        shared = turned(linear(token, weights, "k_proj"), angles[t], neighbours=False)
        keys.append([torch.cat([state[:half], shared]) for state in tied])
        values.append(tied)
    queries, router_queries = mapped_queries(projected, weights, mixers)
    queries = [[with_positions(q, half, angles[t], neighbours=False) for q in x] for t, x in enumerate(queries)]
    sides = {"query": queries, "key": keys, "value": values}
    return read_out(inputs, inputs, sides, router_queries, weights, shape, mixers, allowed)
