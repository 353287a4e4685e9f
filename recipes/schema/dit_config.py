"""Configuration of a diffusion transformer (DiT) in a recipe: the fields of diffusers' DiT, and `mixers`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crosshead.common.errors import RecipeError
from crosshead.modeling.configuration import complete_mixers
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.options import Choice, Flag, Integer, refuse, unknown

SIZES = (
    *("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers"),
    *("sample_size", "patch_size", "num_embeds_ada_norm"),
)
"""Fields that must be integers of at least 1."""


@dataclass(frozen=True)
class DiTFields:
    """Fields of diffusers' `DiTTransformer2DModel` that describe a model, with their defaults, and `mixers`."""

    num_attention_heads: int = 16
    attention_head_dim: int = 72
    in_channels: int = 4
    out_channels: int | None = None
    """`in_channels` (the default), or twice as many: the model then also predicts variances."""
    num_layers: int = 28
    dropout: float = 0.0
    attention_bias: bool = True
    sample_size: int = 32
    patch_size: int = 2
    activation_fn: str = "gelu-approximate"
    num_embeds_ada_norm: int = 1000
    """Number of classes."""
    mixers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in SIZES:
            if key != "out_channels" or self.out_channels is not None:
                Integer().parse(key, getattr(self, key), 0)
        Flag(True).parse("attention_bias", self.attention_bias, 0)
        Choice(("gelu", "gelu-approximate")).parse("activation_fn", self.activation_fn, 0)
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise refuse("dropout", self.dropout, "use a number from 0 to below 1")
        if self.out_channels not in (None, self.in_channels, 2 * self.in_channels):
            allowed = f"use in_channels={self.in_channels}, or twice as many to learn variances"
            raise refuse("out_channels", self.out_channels, allowed)
        if self.sample_size % self.patch_size:
            raise refuse("patch_size", self.patch_size, f"use a number that divides sample_size={self.sample_size}")
        if self.num_attention_heads * self.attention_head_dim % 4:
            allowed = "use a size that makes num_attention_heads * attention_head_dim a multiple of 4"
            raise refuse("attention_head_dim", self.attention_head_dim, allowed)
        object.__setattr__(self, "mixers", complete_mixers(self.mixers, self.layouts()))

    def layouts(self) -> list[HeadLayout]:
        """Return the attention shape of each block."""
        heads, size = self.num_attention_heads, self.attention_head_dim
        return [HeadLayout(heads * size, heads, heads, size, layer_index=block) for block in range(self.num_layers)]


def dit_config(content: Mapping[str, Any]) -> DiTFields:
    """Parse a recipe's `model.config`; raise `RecipeError` for an unknown key or an impossible value."""
    known = sorted(DiTFields.__dataclass_fields__)
    for key in content:
        if key not in known:
            raise RecipeError(str(unknown("model.config", "key", key, known)))
    try:
        return DiTFields(**content)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"model.config: {error}") from None
