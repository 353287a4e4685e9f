"""Fits the two_stage router of `mixture` to a pretrained layer, and the output projection to the active heads.

A head's contribution to a token is the norm of its part of the attention's output. The router's scores are a linear
map of the layer's input, fitted by ridge regression to the logarithm of the contributions: the active heads are those
with the largest expected contribution. The output projection is then fitted by least squares to compute the output of
all heads from the active ones. Layers are fitted in order, each on the outputs of the converted layers before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.families import Shapes
from ..calibration.head_statistics import fast_dtype, full_products
from .fitted_output import MAX_TOKENS, RIDGE, FitData, ridge_map
from .layer_rewrites import Tensors, substituted

HeadOutputs = list[tuple[torch.Tensor, torch.Tensor]]
"""Inputs (T, hidden) and head outputs (T, heads d) of an attention layer, per recorded window."""
ROUTER_RIDGE = 0.01
"""Ridge penalty relative to the mean square of the input features."""


@dataclass(frozen=True)
class Routing:
    """Head counts of one layer's mixture: `active` heads per token, which include the first `shared` heads."""

    shared: int
    active: int
    components: str = ""
    """Label of the layer's component heads, for which the router is fitted; empty if there are none."""

    def name(self, part: str) -> str:
        """Return the calibration name of a tensor that is fitted for these heads."""
        return f"{self.shared}.{self.active}.{self.components}{'.' * bool(self.components)}{part}"

    def names(self) -> tuple[str, str]:
        """Return the calibration names of the fitted tensors: the router's weight, the change of `o_proj.weight`."""
        return self.name("scores"), self.name("output")

    def shapes(self, layout: HeadLayout) -> Shapes:
        """Return the calibration names and shapes of the tensors that are fitted for one layer."""
        scores = (layout.query_heads - self.shared, layout.hidden_size)
        size = layout.value_dim or layout.head_dim
        return dict(zip(self.names(), (scores, (layout.hidden_size, layout.query_heads * size)), strict=True))

    def mask(self, hidden: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return 1 for active heads and 0 for others (..., heads), from the input (..., hidden) and router weight."""
        logits = hidden.to(scores) @ scores.mT
        chosen = logits.topk(self.active - self.shared, dim=-1).indices
        routed = torch.zeros_like(logits).scatter(-1, chosen, 1.0)
        return torch.cat([routed.new_ones(*routed.shape[:-1], self.shared), routed], dim=-1)


@contextmanager
def recorded(attention: Any, windows: torch.Tensor) -> Iterator[HeadOutputs]:
    """Return a context that records an attention layer, which is called once per window (B, T, hidden).

    If the windows have more than `MAX_TOKENS` tokens, evenly spaced ones are recorded.
    """
    outputs, stride, calls = HeadOutputs(), -(-windows.shape[0] * windows.shape[1] // MAX_TOKENS), count()
    hidden: list[torch.Tensor] = []

    def record_input(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        hidden.append(inputs["hidden_states"])

    def record_heads(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        states = hidden.pop()
        if next(calls) % stride == 0:
            # Copies: layers without a norm before attention read the tensor that their outputs are written to.
            x, heads = (tensor.flatten(0, 1).to(fast_dtype(), copy=True) for tensor in (states, args[0]))
            outputs.append((x, heads))

    with (
        attention.register_forward_pre_hook(record_input, with_kwargs=True),
        attention.o_proj.register_forward_pre_hook(record_heads),
    ):
        yield outputs


def fit_router(outputs: HeadOutputs, weight: torch.Tensor, routing: Routing, size: int) -> Tensors:
    """Return the router's weight and the change of the output projection `weight`; `size` is the head size `d`."""
    scores = fit_scores(outputs, weight, routing.shared, size)
    return fit_output(outputs, weight, routing, scores, size)


@torch.no_grad()
def fit_scores(outputs: HeadOutputs, weight: torch.Tensor, shared: int, size: int) -> torch.Tensor:
    """Return the router's weight (heads - shared, hidden), which does not depend on the number of active heads."""
    by_head = weight.double().unflatten(1, (-1, size))
    metric = torch.einsum("nhd,nhe->hde", by_head, by_head)

    def contributions(heads: torch.Tensor) -> torch.Tensor:
        heads = heads.double().unflatten(-1, (-1, size))
        squares = torch.einsum("thd,hde,the->th", heads, metric, heads)
        return squares.clamp_min(torch.finfo(torch.float32).tiny).log()[:, shared:] / 2

    def logarithms() -> Iterator[FitData]:
        for x, heads in outputs:
            yield x.double(), contributions(heads)

    with full_products():
        return ridge_map(logarithms(), ROUTER_RIDGE)


@torch.no_grad()
def fit_output(
    outputs: HeadOutputs, weight: torch.Tensor, routing: Routing, scores: torch.Tensor, size: int
) -> Tensors:
    """Return the router's weight, and the change of the output projection that is fitted to the active heads."""

    def missing_outputs() -> Iterator[FitData]:
        for x, heads in outputs:
            active = heads.double() * routing.mask(x, scores).repeat_interleave(size, -1)
            yield active, (heads.double() - active) @ weight.double().mT

    with full_products():
        change = ridge_map(missing_outputs(), RIDGE)
    return dict(zip(routing.names(), (scores, change), strict=True))


@contextmanager
def routed(attention: Any, fitted: Tensors, routing: Routing, size: int) -> Iterator[None]:
    """Return a context in which a stock attention layer has the outputs of the fitted mixture."""
    scores, change = (fitted[name] for name in routing.names())
    with (
        heads_selected(attention, scores, routing, size),
        substituted(attention, {"o_proj.weight": attention.o_proj.weight + change}),
    ):
        yield


@contextmanager
def heads_selected(attention: Any, scores: torch.Tensor, routing: Routing, size: int) -> Iterator[None]:
    """Return a context in which a stock attention layer has only the outputs of the heads that the router selects."""
    masks: list[torch.Tensor] = []

    def route(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        masks.append(routing.mask(inputs["hidden_states"], scores))

    def select(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (args[0] * masks.pop().repeat_interleave(size, -1).to(args[0]),)

    with (
        attention.register_forward_pre_hook(route, with_kwargs=True),
        attention.o_proj.register_forward_pre_hook(select),
    ):
        yield
