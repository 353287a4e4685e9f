"""Records the states of one attention layer on one text, without changing its outputs, and reports them.

A crosshead layer passes its states to its mechanisms, so two recording mechanisms are added: one before the others and
one after them. A hook records the factor of differential attention, which is not among the states. In a stock layer,
hooks record the output of the value projection and the input of the output projection.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, Mechanism

from .backbones import Backbone, key_value_heads
from .pack import pack_indices, pack_maps, pack_numbers, plain, rounded

TOP = 5
"""Number of keys listed for a query, and of queries for a key."""
Routing = tuple[torch.Tensor, torch.Tensor]
"""Gates (T, heads) and the router's probabilities (T, routed heads)."""


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer for one text or image: T queries, S keys."""

    weights: torch.Tensor
    """Attention weights (maps, T, S), as attention returns them."""
    values: torch.Tensor
    """Values (heads, S, d), as the weights multiply them."""
    attention_outputs: torch.Tensor
    """Head outputs (T, heads, features) before gates and norms."""
    head_outputs: torch.Tensor
    """Head outputs (T, heads, features) after gates and norms, as `o_proj` reads them."""
    routing: Routing | None
    """Gates and probabilities of the router; None without a router."""
    subtracted: torch.Tensor | None
    """Factor of the subtracted head of each pair in differential attention: a number, or (T, pairs)."""

    @property
    def are_finite(self) -> bool:
        """True if weights and norms are finite: damaged weights give nan, and an overflow gives an infinite norm."""
        return bool(
            self.weights.isfinite().all() and (value_norms(self).sum() + _norms(self.head_outputs).sum()).isfinite()
        )


class Recorder(Mechanism):
    """A mechanism that records states and changes nothing."""

    routing: Routing | None = None
    subtracted: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__(HeadLayout(0, 0, 0, 0), {})

    def after_cache(self, state: AttentionState) -> None:
        """Record the values of all tokens, including cached ones."""
        self.values = state.value

    def head_outputs(self, output: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """Record the head outputs and, with a router, its gates and probabilities."""
        self.outputs = output
        if state.gates is not None and state.router_scores is not None:
            self.routing = state.gates[0], state.router_scores[0]
        return output


@contextmanager
def record_states(attention: Any, backbone: Backbone, receive: Callable[[LayerStates], None]) -> Iterator[None]:
    """Pass the states of each call of an attention module to `receive`; the batch size must be 1."""
    before, after = Recorder(), Recorder()
    config = attention.config

    def finish(module: nn.Module, arguments: Any, result: tuple[torch.Tensor, ...]) -> None:
        outputs = before.outputs[0], after.outputs[0]
        receive(LayerStates(result[-1][0], after.values[0], *outputs, after.routing, after.subtracted))

    def record_subtracted(module: nn.Module, arguments: Any, result: torch.Tensor) -> None:
        after.subtracted = result[0] if result.ndim else result

    def record_values(module: nn.Module, arguments: Any, values: torch.Tensor) -> None:
        heads = values.flatten(1, -2).unflatten(-1, (key_value_heads(config), -1)).transpose(1, 2)
        after.values = heads[..., -getattr(config, backbone.value_size) :] if backbone.value_size else heads

    def record_outputs(joined: torch.Tensor) -> None:
        before.outputs = after.outputs = joined.unflatten(-1, (config.num_attention_heads, -1))

    with ExitStack() as stack:
        add = stack.enter_context
        mixers = getattr(attention, "mixers", None)
        if mixers is None:
            add(getattr(attention, backbone.value).register_forward_hook(record_values))
            if backbone.output:
                projection = getattr(attention, backbone.output)
                add(projection.register_forward_pre_hook(lambda _, arguments: record_outputs(arguments[0])))
            else:
                add(attention.register_forward_hook(lambda _, arguments, result: record_outputs(result[0])))
        else:
            order, first = attention.output_order, 0
            stack.callback(setattr, attention, "mixers", mixers)
            stack.callback(setattr, attention, "output_order", order)
            if "differential" in mixers:
                add(mixers["differential"].register_forward_hook(record_subtracted))
                first = mixers["differential"].version - 1  # version 2 subtracts outputs
            attention.output_order = [*order[:first], "before", *order[first:], "after"]
            attention.mixers = nn.ModuleDict({"before": before, **mixers, "after": after})
        add(attention.register_forward_hook(finish))
        yield


def layer_record(states: LayerStates, positions: torch.Tensor | None, causal: bool) -> dict[str, Any]:
    """Return attention maps, their largest weights and measures, norms, similarities and routing, ready for JSON.

    `positions` are the tokens' positions in self-attention: (T, 1) in a text, (T, 2) in an image.
    """
    maps = output_weights(states.weights, states.subtracted).float()
    labels = [str(head) for head in range(len(maps))]
    patterns, outputs = pattern_similarity(maps), output_similarity(states.attention_outputs.float())
    if len(states.weights) != len(maps):  # each head output combines several softmaxes
        maps = torch.cat([maps, states.weights.float()])
        labels += [f"softmax {index}" for index in range(len(states.weights))]
    of_image = positions is not None and positions.shape[1] == 2  # most weights are small there
    values, head_outputs = value_norms(states), _norms(states.head_outputs).T
    norms = {"value_norm": values, "output_norm": head_outputs}
    measures = map_measures(maps, positions, causal) | {name: norm.mean(-1) for name, norm in norms.items()}
    return {
        "labels": labels,
        "maps": pack_maps(maps, 0.0 if of_image else 1.0),
        "keys": _largest_weights(maps),
        "queries": _largest_weights(maps.transpose(1, 2)),
        "measures": {name: plain(measure) for name, measure in measures.items()},
        "value_norms": pack_numbers(values),
        "output_norms": pack_numbers(head_outputs),
        "pattern_similarity": plain(patterns),
        "output_similarity": plain(outputs),
        "mean_similarity": {"patterns": mean_of_pairs(patterns), "outputs": mean_of_pairs(outputs)},
        "routing": None if states.routing is None else _routing(*states.routing),
    }


def output_weights(weights: torch.Tensor, subtracted: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of each value in each head output (heads, T, S), from attention's weights (maps, T, S).

    In differential attention, this is the difference between the two maps of a pair, before the norm.
    """
    if subtracted is None:
        return weights
    factor = subtracted.T.unsqueeze(-1) if subtracted.ndim else subtracted
    return weights[0::2] - factor.to(weights.dtype) * weights[1::2]


def map_measures(maps: torch.Tensor, positions: torch.Tensor | None, causal: bool) -> dict[str, torch.Tensor]:
    """Return measures that distinguish kinds of heads, each with one number per map of (maps, T, S).

    Only self-attention has `positions`, (T, 1) in a text and (T, 2) in an image, where special tokens have nan.
    """
    later = maps[:, 1:] if causal else maps  # the first query of a causal map sees one key only
    size = maps.abs()
    shares = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    measures = {"first": later[:, :, 0].sum(-1) / max(1, later.shape[1])}
    if positions is not None:
        if positions.shape[1] == 1:
            steps = {"previous": -1} if causal else {"previous": -1, "next": 1}
            pairs = max(1, len(positions) - 1)
            measures |= {name: maps.diagonal(step, 1, 2).sum(-1) / pairs for name, step in steps.items()}
        measures["own"] = maps.diagonal(0, 1, 2).mean(-1)
        distances = torch.cdist(positions, positions)
        placed = shares * ~distances.isnan()
        total = placed.sum((1, 2)).clamp_min(torch.finfo(size.dtype).tiny)
        measures["distance"] = (placed * distances.nan_to_num()).sum((1, 2)) / total
    measures["entropy"] = torch.special.entr(shares).sum(-1).mean(-1) / torch.log(torch.tensor(2.0))
    return measures


def pattern_similarity(maps: torch.Tensor) -> torch.Tensor:
    """Return `1 - |A - A'|_1 / 2` (maps, maps) of all pairs of maps, mean over queries: table B of Mixture-of-Head."""
    distances = [(maps - other).abs().sum(-1).mean(-1) for other in maps]
    return 1 - torch.stack(distances) / 2


def output_similarity(outputs: torch.Tensor) -> torch.Tensor:
    """Return the cosines (heads, heads) of all pairs of heads' outputs (T, heads, features), mean over tokens."""
    unit = torch.nn.functional.normalize(outputs, dim=-1)
    return torch.einsum("tif,tjf->ij", unit, unit) / len(outputs)


def mean_of_pairs(similarity: torch.Tensor) -> float | None:
    """Return the mean over pairs of different heads; None for one head."""
    heads = len(similarity)
    if heads < 2:
        return None
    return rounded(float((similarity.sum() - similarity.trace()) / (heads * (heads - 1))))


def value_norms(states: LayerStates) -> torch.Tensor:
    """Return the norms (heads, S) of the values of each head output; a pair of heads concatenates two values."""
    per_output = states.attention_outputs.shape[-1] // states.values.shape[-1]
    return _norms(states.values.unflatten(0, (-1, per_output)).transpose(1, 2).flatten(2))


def _norms(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x.float(), dim=-1)


def _largest_weights(maps: torch.Tensor) -> dict[str, Any]:
    """Return index and value of the largest weights of each row; zero weights have the index -1."""
    indices = maps.abs().topk(min(TOP, maps.shape[-1]), dim=-1).indices
    weights = maps.gather(-1, indices)
    return {"index": pack_indices(indices.masked_fill(weights == 0, -1)), "weight": pack_numbers(weights)}


def _routing(gates: torch.Tensor, scores: torch.Tensor) -> dict[str, Any]:
    shared = torch.full((gates.shape[1] - scores.shape[1],), torch.nan)  # shared heads have no score
    return {
        "gates": pack_numbers(gates.T),
        "load": plain((gates != 0).float().mean(0)),
        "mean_gate": plain(gates.mean(0)),
        "scores": pack_numbers(scores.T),
        "mean_score": plain(torch.cat([shared, scores.float().mean(0)])),
    }
