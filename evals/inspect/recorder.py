"""Sees what the attention of one layer does, stock or mixed, without changing it.

A mixed layer hands its states to its mechanisms, so it is watched by two more of them, one before and one after the
others. A stock layer is watched where its values come out and its head outputs go in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, Mechanism
from crosshead.modeling.ops import split_heads


@dataclass(frozen=True)
class Seen:
    """One layer at one text, the first of the batch."""

    weights: torch.Tensor
    """(maps, T, S), as attention returns them."""
    values: torch.Tensor
    """(heads, S, d), as the weights meet them."""
    made: torch.Tensor
    """(T, heads, features): head outputs as attention makes them."""
    output: torch.Tensor
    """The same as they reach `o_proj`, with gates and norms."""
    routing: tuple[torch.Tensor, torch.Tensor] | None
    """Gates (T, heads), and the router's probabilities (T, routed heads)."""


@dataclass
class _Notes:
    """Tensors of the call that is under way."""

    values: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    routing: tuple[torch.Tensor, torch.Tensor] | None = None


class Watcher(Mechanism):
    """A mechanism that only takes notes."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__(HeadLayout(0, 0, 0, 0), {})
        self.notes = notes

    def after_cache(self, state: AttentionState) -> None:
        """Keep the values; the last to look sees them as attention reads them."""
        self.notes.values.append(state.value)

    def head_outputs(self, output: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """Keep the outputs, first and last."""
        self.notes.outputs.append(output)
        return output


@contextmanager
def watching(attention: Any, tell: Callable[[Seen], None]) -> Iterator[None]:
    """While this lasts, each call of an attention module is told to `tell`."""
    notes = _Notes()

    def finish(module: nn.Module, arguments: Any, result: tuple[torch.Tensor, torch.Tensor]) -> None:
        made, output = notes.outputs[0][0], notes.outputs[-1][0]
        tell(Seen(result[1][0], notes.values[-1][0], made, output, notes.routing))
        notes.values.clear()
        notes.outputs.clear()

    hooks = [attention.register_forward_hook(finish)]
    mixers = getattr(attention, "mixers", None)
    if mixers is None:
        hooks += _watch_stock(attention, notes)
    else:
        if "mixture" in mixers:
            hooks.append(mixers["mixture"].register_forward_hook(partial(_keep_routing, notes)))
        order = attention.output_order
        attention.output_order = ["before", *order, "after"]
        attention.mixers = nn.ModuleDict({"before": Watcher(notes), **mixers, "after": Watcher(notes)})
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if mixers is not None:
            attention.mixers, attention.output_order = mixers, order


def _keep_routing(notes: _Notes, module: nn.Module, arguments: Any, result: tuple[torch.Tensor, torch.Tensor]) -> None:
    gates, scores = result
    notes.routing = (gates[0], scores[0])


def _watch_stock(attention: Any, notes: _Notes) -> list[Any]:
    size = attention.head_dim

    def keep_values(module: nn.Module, arguments: Any, values: torch.Tensor) -> None:
        notes.values.append(split_heads(values, size))

    def keep_outputs(module: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        notes.outputs.append(arguments[0].unflatten(-1, (-1, size)))

    return [
        attention.v_proj.register_forward_hook(keep_values),
        attention.o_proj.register_forward_pre_hook(keep_outputs),
    ]
