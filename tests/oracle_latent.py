"""Reference implementation of MLA and grouped-tied attention (GTA) with slow loops and the mechanisms of `oracles.py`.

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
"""Epsilon of the RMSNorms on compressed vectors; it does not depend on the config's rms_norm_eps."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of MLA. RoPE pairs neighbouring features if `neighbours`, else the two halves."""

    latent: int
    plain: int
    """Features of a query or key head without RoPE (qk_nope_head_dim)."""
    value: int
    neighbours: bool


def turned(vector: Tensor, angles: Tensor, neighbours: bool) -> Tensor:
    """Return the vector with each pair of features rotated by its angle (RoPE)."""
    count = len(angles)
    pairs = [(2 * i, 2 * i + 1) if neighbours else (i, i + count) for i in range(count)]
    rotated = [vector[0]] * len(vector)
    for (first, second), angle in zip(pairs, angles, strict=True):
        rotated[first] = vector[first] * torch.cos(angle) - vector[second] * torch.sin(angle)
        rotated[second] = vector[first] * torch.sin(angle) + vector[second] * torch.cos(angle)
    return torch.stack(rotated)


def mapped_queries(projected: Heads, weights: Weights, mixers: Mixers) -> tuple[Heads, Heads]:
    """Return the queries after `knocking`, and the router's queries: before it, if `mixture` comes first."""
    router_queries = projected
    for name, options in mixers.items():
        if name == "knocking":
            projected = [[knocking(v, "query", weights, options) for v in token] for token in projected]
        if name == "mixture":
            router_queries = projected
    return projected, router_queries


def with_positions(vector: Tensor, plain: int, angles: Tensor, neighbours: bool) -> Tensor:
    """Return a query or key with RoPE on all features after the first `plain`."""
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
    """Return MLA's output and extras for one sequence (T, hidden); `angles` are (T, rotary features / 2)."""
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
        per_head = linear(latent, weights, "kv_b_proj").split(sizes.plain + sizes.value)
        keys.append([torch.cat([head[: sizes.plain], shared]) for head in per_head])
        values.append([head[sizes.plain :] for head in per_head])
    queries, router_queries = mapped_queries(queries, weights, mixers)
    queries = [[with_positions(q, sizes.plain, angles[t], sizes.neighbours) for q in x] for t, x in enumerate(queries)]
    if "knocking" in mixers:
        values = [[knocking(v, "value", weights, mixers["knocking"]) for v in token] for token in values]
    sides = {"query": queries, "key": keys, "value": values}
    return read_out(inputs, torch.stack(compressed), sides, router_queries, weights, shape, mixers, allowed)


def tied_sequence(
    inputs: Tensor, weights: Weights, shape: LayerShape, mixers: Mixers, angles: Tensor, allowed: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return GTA's output and extras for one sequence: values are the tied states, keys contain their first halves."""
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
