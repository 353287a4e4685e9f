"""The interface of mechanisms: `Rules` checks the options, `Mechanism` has the hooks that an attention layer calls.

`Mechanism` defines the hooks in the order of a forward pass; `CrossheadAttention` sorts the mechanisms of a layer.
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
"""Complete options of one mechanism in one layer, with per-layer counts resolved to one number."""


def package_only(definition: Any) -> Any:
    """Mark a definition that saved models do not need; `bundle.py` leaves it out of their code."""
    return definition


@dataclass(frozen=True)
class HeadLayout:
    """Head counts, head sizes and norms of one attention layer, for its mechanisms."""

    hidden_size: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    value_dim: int = 0  # size of a value head; 0 stands for `head_dim`
    layer_index: int = 0
    norm_eps: float = 1e-6
    key_norm_eps: float | None = None  # epsilon of the per-head norm on keys; None without a norm
    dropout: float = 0.0
    output_heads: int = 0  # number of heads in the input of `o_proj`
    output_dim: int = 0  # features per head in the input of `o_proj`
    key_components: int = 0  # number of heads that `k_proj` makes
    value_components: int = 0  # number of heads that `v_proj` makes
    is_rotary: bool = True  # RoPE is applied to queries and keys
    projects_keys: bool = True  # if False, keys and values are the layer's input itself
    combines_keys: bool = False  # `k_norm` only multiplies by its weight; a mechanism divides by the RMS


class Rules:
    """The options of a mechanism, and checks of the layers that it can work in; needs no torch."""

    options: ClassVar[dict[str, Option]]
    """Option name -> kind of option, without `layers`, which every mechanism takes."""
    replaces_attention: ClassVar[bool] = False  # computes attention itself; at most one per layer

    @classmethod
    def complete(cls, options: Settings) -> Settings:
        """Return the options, with defaults that depend on other options filled in."""
        return options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Raise `ValueError` if the settings cannot work in this layer, whose mechanisms and settings are `layer`."""

    @classmethod
    def reshape(cls, settings: Settings, layout: HeadLayout) -> HeadLayout:
        """Return the layout of a layer that has this mechanism."""
        return layout

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """Whether tensor parallelism works: each process has some heads, and all parameters of the mechanism."""
        return False

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """Whether the initial parameters leave the layer's outputs unchanged."""
        return False


@dataclass(slots=True)
class AttentionState:
    """The tensors of one attention call, which the hooks of mechanisms read and change."""

    hidden_states: Tensor  # (B, T, hidden)
    key_value_input: Tensor  # (B, S, hidden): input of the key and value projections
    query: Tensor  # (B, H, T, d)
    key: Tensor  # (B, heads, S, d)
    value: Tensor  # (B, heads, S, value size)
    position_bias: Tensor | None = None  # (B or 1, H, T, S): added to the mask unless a mechanism takes it
    key_side_data: dict[str, Tensor] = field(default_factory=dict)  # cached with keys, by name: (B, S, n)
    gates: Tensor | None = None  # (B, T, heads): factor of each head's output
    router_scores: Tensor | None = None  # (B, T, routed heads): probability of each routed head
    function: str | None = None  # name of the attention function that a mechanism chose for this call
    attention_kwargs: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of that function


class AuxiliaryLoss(NamedTuple):
    """A loss of a mechanism, added to the loss of the labels with a weight."""

    name: str  # field of the model's output
    value: Tensor
    weight: float


class ParameterModule(nn.Module):
    """A module that owns parameters of a mechanism."""

    def initialise(self, std: float) -> None:
        """Set initial values with `transformers.initialization`, which skips parameters loaded from a checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} does not initialise its parameters")


class LinearMap(ParameterModule):
    """Like `nn.Linear` without bias, but no subclass: quantisation and adapters select layers by that class."""

    def __init__(self, in_features: int, out_features: int, start: str = "random") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.start = start

    def initialise(self, std: float) -> None:
        """Start as the identity, as zero, or with normal values of standard deviation `std`."""
        if self.start == "identity":
            init.copy_(self.weight, torch.eye(*self.weight.shape, dtype=self.weight.dtype, device=self.weight.device))
        elif self.start == "zero":
            init.zeros_(self.weight)
        else:
            init.normal_(self.weight, mean=0.0, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x W^T`."""
        return functional.linear(x, self.weight)


class Mechanism(nn.Module):
    """A mechanism in one layer. The default of each hook changes nothing."""

    rules: ClassVar[type[Rules]]
    recorded: ClassVar[dict[str, int]] = {}  # output field -> index in the result of `forward`
    maps_last: ClassVar[bool] = False  # `before_rope` runs after that of all other mechanisms
    wide_cache = False  # the cache stores heads as one wide head, which `after_cache` receives

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__()
        self.layout = layout
        self.settings = settings

    @classmethod
    def check_implementation(cls, implementation: str | None, settings: Settings) -> None:
        """Raise `ValueError` if an `attn_implementation` cannot run this mechanism."""

    def before_rope(self, state: AttentionState) -> None:
        """Change the projected queries, keys and values, before QK-norm and RoPE."""

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Return the name of a registered attention function, and set its arguments in `state.attention_kwargs`.

        The state has all keys and values after RoPE, past ones included. None leaves the choice to the next mechanism
        and, after the last one, to the model's `attn_implementation`.
        """
        return None

    def after_cache(self, state: AttentionState) -> None:
        """Turn all keys and values, past and present, into those that the attention function reads."""

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Return changed head outputs (B, T, heads, features), the input of `o_proj`."""
        return output

    @classmethod
    def auxiliary_loss(cls, outputs: Any, config: Any, attention_mask: Tensor | None) -> AuxiliaryLoss | None:
        """Return the mechanism's own loss, computed from recorded model outputs, or None."""
        return None
