"""The contract that every mechanism fills.

A mechanism is an `nn.Module` that sees heads as tensors and knows no backbone. One attention layer calls the hooks
of its mechanisms at fixed stages; at one stage, mechanisms run in the order of the config:

0. `on_hidden`: the hidden states are there, and nothing is projected yet.
1. `on_projected`: queries, keys and values have just been projected; no norm, no position yet.
   `on_settled`: all mechanisms are done with that; norms and positions come next.
2. `on_cached`: keys and values have positions and have passed the cache; what it holds may differ from what is used.
3. `attend`: queries meet keys. At most one mechanism of a layer replaces this step (`owns_attention`); others may
   offer a cheaper way to the same result, here or, where keys and values need not be completed for it, in
   `attend_cached`, in place of all of 2 and 3.
4. `on_output`: each head has its output, `o_proj` comes next; whose attention it was goes first. `project_out` may be
   both in one step.

Parameters live in leaf modules and are only read inside the leaf's own `forward`, because libraries that offload
weights fetch them by a hook on exactly that call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from .chosen_projection import ChosenTokens
from .options import Option


@dataclass(frozen=True)
class HeadLayout:
    """What a mechanism may know about the attention layer it works in."""

    hidden_size: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    layer_index: int = 0
    norm_eps: float = 1e-6
    key_norm_eps: float | None = None
    """The eps of the per-head norm on keys; None where the backbone has no such norm."""
    dropout: float = 0.0
    output_heads: int = 0
    """How many head outputs reach `on_output`."""


@dataclass
class HeadStates:
    """The tensors of one attention call, handed from stage to stage."""

    hidden: torch.Tensor
    """What the queries were projected from: (B, T, hidden)."""
    memory: torch.Tensor
    """What the keys and values were projected from: (B, S, hidden); `hidden` itself in self-attention."""
    query: torch.Tensor
    """(B, H, T, d)."""
    key: torch.Tensor
    """(B, heads, S, d)."""
    value: torch.Tensor
    """(B, heads, S, d)."""
    per_key: dict[str, torch.Tensor] = field(default_factory=dict)
    """Numbers that belong to a key and must be cached beside it, by mechanism and purpose: (B, S, n)."""
    gates: torch.Tensor | None = None
    """(B, T, heads): how much each head's output counts."""
    router_scores: torch.Tensor | None = None
    """(B, T, routed heads): the probabilities that the gates were made of."""
    folded: frozenset[str] = frozenset()
    """Of "query", "key", "value": whose `linear_map` the projection has applied already."""


Attended = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs (B, T, H, features), and weights (B, H, T, S) or None."""


@dataclass(frozen=True)
class AttentionCall:
    """How a layer runs attention: the backend bound to its mask, and the facts to do without the backend."""

    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Attended]
    """From query, key and value."""
    eager: bool
    """The backend is eager attention, which returns the weights its outputs were made with."""
    mask: torch.Tensor | None
    scaling: float
    dropout: float
    plain: bool = False
    """It is the softmax under `mask`, which is True where a key is seen (B or 1, 1, T, S), and returns no weights."""
    causal: bool = True
    """Without a mask, each of several queries sees the keys up to its own, and not all."""


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one attention call, to count what it costs."""

    queries: int
    new_keys: int
    """Keys and values that this call projects."""
    keys: int
    """All that the queries meet: the past and the new ones."""
    key_heads: int
    """Heads of the key projection."""
    value_heads: int


MASKED_HERE = ("eager", "sdpa")
"""The attention backends whose masks a mechanism can apply itself."""

Settings = dict[str, Any]
"""The options of one mechanism in one layer, complete, per-layer counts resolved to one number."""


class MixerLeaf(nn.Module):
    """A module that owns parameters of a mechanism and knows how they start."""

    def initialise(self, std: float) -> None:
        """Set the starting values with `transformers.initialization`, which spares what a checkpoint has loaded."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its parameters start")


class LinearLeaf(MixerLeaf):
    """A linear map without bias, in the orientation of `nn.Linear`.

    Not one itself: libraries that quantise or adapt every `nn.Linear` would replace it before it has a value to keep.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T`."""
        return functional.linear(x, self.weight)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


def weight_count(module: nn.Module) -> int:
    """How many parameters a module holds."""
    return sum(parameter.numel() for parameter in module.parameters())


class Mixer(nn.Module):
    """A mechanism in one layer. Every hook's default changes nothing."""

    options: ClassVar[dict[str, Option]]
    """The options a config may give, without `layers`, which every mechanism takes."""
    owns_attention: ClassVar[bool] = False
    """Replaces the attention step itself."""
    needs_weights: ClassVar[bool] = False
    """Needs the logits or weights themselves, so it runs only under backends whose masks it can apply itself."""

    divides_keys: bool = False
    """Divides keys by their root mean square itself, so that the backbone's norm on keys only scales."""
    reads_side_by_side: bool = False
    """`attend_cached` is sooner done where the heads of a token lie side by side in the cache."""

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__()
        self.layout = layout
        self.settings = settings

    @classmethod
    def complete(cls, options: Settings) -> Settings:
        """Fill in options whose default depends on others."""
        return options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Raise `ValueError` where the settings cannot work in this layer beside the layer's other mechanisms."""

    @classmethod
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """Whether the layer, with the values that its parameters start with, computes what it did without."""
        return False

    @classmethod
    def reshape(cls, layout: HeadLayout) -> HeadLayout:
        """The layout that the mechanisms of this layer see when this one is among them."""
        return layout

    def component_heads(self, side: str) -> int:
        """How many heads the projection of `side` ("key" or "value") has."""
        return self.layout.key_value_heads

    def cached_numbers(self) -> int:
        """How many numbers this mechanism keeps beside the keys of each cached token."""
        return 0

    def multiplications(self, call: CallSizes) -> int:
        """Multiplications of the matrix products that this mechanism adds to one call, as it runs eagerly."""
        return 0

    def learnt(self) -> dict[str, torch.Tensor]:
        """What it has learnt, as matrices to look at: rows are what comes out, columns what goes in."""
        matrices = {name: parameter for name, parameter in self.named_parameters() if parameter.ndim == 2}
        return {name.removesuffix(".weight"): matrix.detach() for name, matrix in matrices.items()}

    def output_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """How much of each value is in each head output, from the weights (B, maps, T, S) that attention returns."""
        return weights

    def linear_map(self, side: str) -> nn.Module | None:
        """What it does to each head of "query", "key" or "value" in `on_projected`, where that is one linear map:
        a module without others in it.

        The layer may fold it into the projection if this mechanism is its first, and says so in `states.folded`.
        """
        return None

    def chosen_tokens(self, projection: nn.Module, states: HeadStates, call: AttentionCall) -> ChosenTokens | None:
        """Which tokens of each head count, where a projection of queries or of outputs is sooner done for them alone.

        Only asked where no other mechanism is in the layer.
        """
        return None

    def on_hidden(self, states: HeadStates) -> None:
        """Queries, keys and values are empty yet."""

    def on_projected(self, states: HeadStates) -> None:
        """Queries, keys and values are projected."""

    def on_settled(self, states: HeadStates) -> None:
        """Queries, keys and values are as they will be normed and placed."""

    def on_cached(self, states: HeadStates) -> None:
        """Keys and values are complete: the past, then the present."""

    def attend_cached(self, states: HeadStates, call: AttentionCall) -> Attended | None:
        """Attend to keys and values as the cache holds them, where that is cheaper; not asked where one is owned."""
        return None

    def attend(self, states: HeadStates, call: AttentionCall) -> Attended | None:
        """Attend, where this mechanism owns attention or has a cheaper way to the same; None leaves it to others."""
        return None

    def on_output(self, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Head outputs (B, T, heads, features)."""
        return output

    def project_out(self, projection: nn.Module, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Hidden states (B, T, D): `on_output` of the layer's last mechanism, and the output projection."""
        hidden: torch.Tensor = projection(self.on_output(output, states).flatten(2).contiguous())
        return hidden
