"""The data of one attention layer on one text, for the report."""

from collections.abc import Iterable
from typing import Any

import torch

from crosshead.modeling.mechanisms.base import Mechanism
from crosshead.modeling.mechanisms.differential import Differential

from .pack import pack_indices, pack_maps, pack_numbers, plain, rounded
from .recorder import Seen

TOP = 5
"""Keys shown of a query, and queries of a key."""


def layer_record(seen: Seen, mixers: Iterable[Mechanism]) -> dict[str, Any]:
    """Maps, their greatest weights and shapes, norms, similarities, and what the router did, ready for JSON."""
    maps = output_weights(seen.weights, mixers).float()
    labels = [str(head) for head in range(len(maps))]
    patterns, outputs = pattern_similarity(maps), output_similarity(seen.made.float())
    if len(seen.weights) != len(maps):  # a head output is made of several of them
        maps = torch.cat([maps, seen.weights.float()])
        labels += [f"softmax {index}" for index in range(len(seen.weights))]
    return {
        "labels": labels,
        "maps": pack_maps(maps),
        "keys": _greatest(maps),
        "queries": _greatest(maps.transpose(1, 2)),
        "measures": {name: plain(measure) for name, measure in map_measures(maps).items()}
        | {"value_norm": plain(value_norms(seen).mean(-1)), "output_norm": plain(_output_norms(seen).mean(-1))},
        "value_norms": pack_numbers(value_norms(seen)),
        "output_norms": pack_numbers(_output_norms(seen)),
        "pattern_similarity": plain(patterns),
        "output_similarity": plain(outputs),
        "mean_similarity": {"patterns": mean_of_pairs(patterns), "outputs": mean_of_pairs(outputs)},
        "routing": None if seen.routing is None else _routing(*seen.routing),
    }


def output_weights(weights: torch.Tensor, mixers: Iterable[Mechanism]) -> torch.Tensor:
    """The weight of each value in each head output, from the weights (maps, T, S) that attention returns.

    In differential attention it is the difference within each pair, before the norm.
    """
    for mixer in mixers:
        if isinstance(mixer, Differential):
            weights = weights[0::2] - mixer().to(weights.dtype) * weights[1::2]
    return weights


def map_measures(maps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers that tell kinds of heads apart, one a map (maps, T, S)."""
    later = maps[:, 1:]  # the first query has no choice
    size = maps.abs()
    shares = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    steps = torch.arange(maps.shape[1]).unsqueeze(1) - torch.arange(maps.shape[2])
    return {
        "first": later[:, :, 0].sum(-1) / max(1, later.shape[1]),
        "previous": maps.diagonal(-1, 1, 2).sum(-1) / max(1, later.shape[1]),
        "own": maps.diagonal(0, 1, 2).mean(-1),
        "distance": (shares * steps).sum(-1).mean(-1),
        "entropy": torch.special.entr(shares).sum(-1).mean(-1) / torch.log(torch.tensor(2.0)),
    }


def pattern_similarity(maps: torch.Tensor) -> torch.Tensor:
    """`1 - |A - A'|_1 / 2` of each two maps (maps, T, S), mean over queries, as in table B of Mixture-of-Head."""
    distances = [(maps - each).abs().sum(-1).mean(-1) for each in maps]
    return 1 - torch.stack(distances) / 2


def output_similarity(outputs: torch.Tensor) -> torch.Tensor:
    """Cosine of each two heads' outputs (T, heads, features), mean over tokens."""
    unit = torch.nn.functional.normalize(outputs, dim=-1)
    return torch.einsum("tif,tjf->ij", unit, unit) / len(outputs)


def mean_of_pairs(similarity: torch.Tensor) -> float | None:
    """The mean over pairs of different heads."""
    heads = len(similarity)
    if heads < 2:
        return None
    return rounded(float((similarity.sum() - similarity.trace()) / (heads * (heads - 1))))


def _greatest(maps: torch.Tensor) -> dict[str, Any]:
    """Of each row, where the greatest weights are, and those; -1 where there are fewer."""
    count = min(TOP, maps.shape[-1])
    places = maps.abs().topk(count, dim=-1).indices
    weights = maps.gather(-1, places)
    return {"index": pack_indices(places.masked_fill(weights == 0, -1)), "weight": pack_numbers(weights)}


def value_norms(seen: Seen) -> torch.Tensor:
    """(heads, S): of each value that a head output takes; a pair of heads takes two side by side as one."""
    side_by_side = seen.made.shape[-1] // seen.values.shape[-1]
    return _norms(seen.values.unflatten(0, (-1, side_by_side)).transpose(1, 2).flatten(2))


def _norms(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x.float(), dim=-1)


def _output_norms(seen: Seen) -> torch.Tensor:
    """(heads, T)"""
    return _norms(seen.output).T


def _routing(gates: torch.Tensor, scores: torch.Tensor) -> dict[str, Any]:
    always_on = torch.full((gates.shape[1] - scores.shape[1],), torch.nan)  # and so without a score
    return {
        "gates": pack_numbers(gates.T),
        "load": plain((gates != 0).float().mean(0)),
        "mean_gate": plain(gates.mean(0)),
        "scores": pack_numbers(scores.T),
        "mean_score": plain(torch.cat([always_on, scores.float().mean(0)])),
    }
