"""The contract of a mechanism: `Rules` for its options, and a `Mechanism` whose hooks an attention layer calls.

The hooks stand in `Mechanism` in the order of a forward pass; mechanisms run in the order of the config.
Parameters live in `ParameterModule`s and are read only inside their `forward`, which returns results or copies and
never the parameter itself: libraries that offload or shard weights free them after that call.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional

from ..options import Option

Settings = dict[str, Any]
"""The options of one mechanism in one layer, complete, per-layer counts resolved to one number."""


def package_only(definition: Any) -> Any:
    """Mark a definition that published models do not need: the code that is written beside them leaves it out."""
    return definition


@dataclass(frozen=True)
class HeadLayout:
    """The shape of one attention layer, as its mechanisms see it."""

    hidden_size: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    value_dim: int = 0  # the head size of values, where it is not `head_dim`
    layer_index: int = 0
    norm_eps: float = 1e-6
    key_norm_eps: float | None = None  # of the per-head norm on keys, where the backbone has one
    dropout: float = 0.0
    output_heads: int = 0  # head outputs that reach `head_outputs`
    output_dim: int = 0  # features of a head output that `o_proj` reads
    key_components: int = 0  # heads of the key projection
    value_components: int = 0
    is_rotary: bool = True  # rotary positions turn queries and keys
    projects_keys: bool = True  # keys and values are projections, not the layer's input itself
    combines_keys: bool = False  # `k_norm` only multiplies by its weight; the mechanism divides by the RMS


class Rules:
    """The options of a mechanism, and which layers it can work in; needs no torch."""

    options: ClassVar[dict[str, Option]]
    """Without `layers`, which every mechanism takes."""
    replaces_attention: ClassVar[bool] = False

    @classmethod
    def complete(cls, options: Settings) -> Settings:
        """Fill in options whose default depends on others."""
        return options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Raise `ValueError` where the settings cannot work in this layer together with its other mechanisms."""

    @classmethod
    def reshape(cls, settings: Settings, layout: HeadLayout) -> HeadLayout:
        """The layout of a layer that has this mechanism."""
        return layout

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """Whether several processes can compute some of the heads each, with all parameters of the mechanism."""
        return False

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """Whether the initial parameters leave the layer's outputs as they were without the mechanism."""
        return False


@dataclass(slots=True)
class AttentionState:
    """The tensors of one attention call."""

    hidden_states: Tensor  # (B, T, hidden)
    key_value_input: Tensor  # (B, S, hidden), which keys and values are projected from
    query: Tensor  # (B, H, T, d)
    key: Tensor  # (B, heads, S, d)
    value: Tensor
    position_bias: Tensor | None = None  # added to the mask, unless an attention function takes it
    key_side_data: dict[str, Tensor] = field(default_factory=dict)  # cached with keys, by purpose: (B, S, n)
    gates: Tensor | None = None  # (B, T, heads): the factor on each head's output
    router_scores: Tensor | None = None  # (B, T, routed heads): each routed head's probability
    function: str | None = None  # the attention function that a mechanism chose for this call
    attention_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of that function


class AuxiliaryLoss(NamedTuple):
    """A loss beside that of the labels."""

    name: str  # the field of the model's output
    value: Tensor
    weight: float


class ParameterModule(nn.Module):
    """A module that owns parameters of a mechanism."""

    def initialise(self, std: float) -> None:
        """Set the initial values by `transformers.initialization`, which skips those that a checkpoint holds."""
        raise NotImplementedError(f"{type(self).__name__} does not initialise its parameters")


class LinearMap(ParameterModule):
    """A linear map without bias, oriented as `nn.Linear`: a subclass would be quantised or adapted with the others."""

    def __init__(self, in_features: int, out_features: int, start: str = "random") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.start = start

    def initialise(self, std: float) -> None:
        """Start as the identity, as zero, or at random."""
        if self.start == "identity":
            init.copy_(self.weight, torch.eye(*self.weight.shape, dtype=self.weight.dtype, device=self.weight.device))
        elif self.start == "zero":
            init.zeros_(self.weight)
        else:
            init.normal_(self.weight, mean=0.0, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """`x W^T`."""
        return functional.linear(x, self.weight)


class Mechanism(nn.Module):
    """A mechanism in one layer. By default, each hook changes nothing."""

    rules: ClassVar[type[Rules]]
    recorded: ClassVar[dict[str, int]] = {}  # output fields -> their index in what `forward` returns
    maps_last: ClassVar[bool] = False  # its `before_rope` runs after those of the other mechanisms
    wide_cache = False  # the cache, and the state after it, hold the heads of a token as one wide head

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__()
        self.layout = layout
        self.settings = settings

    @classmethod
    def check_implementation(cls, implementation: str | None, settings: Settings) -> None:
        """Raise `ValueError` where an `attn_implementation` cannot run this mechanism."""

    def before_rope(self, state: AttentionState) -> None:
        """Change the projected queries, keys and values: no QK-norm and no position is applied yet."""

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """The registered function for this call, its arguments in `state.attention_kwargs`.

        Keys and values have positions, past ones included. None leaves the choice to the next mechanism, and in the
        end to the model's `attn_implementation`.
        """
        return None

    def after_cache(self, state: AttentionState) -> None:
        """Turn cached keys and values, past and present, into those that attention reads."""

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Change the head outputs (B, T, heads, features), which `o_proj` reads next."""
        return output

    @classmethod
    def auxiliary_loss(cls, outputs: Any, config: Any, attention_mask: Tensor | None) -> AuxiliaryLoss | None:
        """The mechanism's own loss, from the outputs that the model recorded."""
        return None
