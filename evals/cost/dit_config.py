"""The config of a DiT, the diffusion transformer of diffusers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from crosshead.modeling.mechanisms.base import HeadLayout

CLASSES = ("DiTTransformer2DModel", "CrossheadDiTTransformer2DModel")
"""The `_class_name` of a config without and with mechanisms."""


@dataclass(frozen=True)
class DiTConfig:
    """The content of a config.json that diffusers reads, and the mechanisms."""

    content: Mapping[str, Any]
    mixers: dict[str, Any] = field(default_factory=dict)
    model_type: ClassVar[str] = "dit"
    dtype: ClassVar[None] = None

    @classmethod
    def read(cls, content: Mapping[str, Any], mixers: dict[str, Any] | None = None) -> "DiTConfig":
        """The checked config; `mixers` replace those in the file, and their options get complete."""
        given = (content.get("mixers") or {}) if mixers is None else mixers
        stock = {name: value for name, value in content.items() if name != "mixers"}
        return cls(stock, cls(stock, given).on_meta().mixers)

    def on_meta(self) -> Any:
        """The model without memory for its weights."""
        from crosshead.modeling.dit import CrossheadDiTTransformer2DModel  # needs diffusers

        with torch.device("meta"):
            return CrossheadDiTTransformer2DModel.from_config(self.content, mixers=self.mixers).eval()

    def layouts(self) -> list[HeadLayout]:
        """The shape of attention in each block."""
        return self.on_meta().layouts()

    @property
    def tokens(self) -> int:
        """The patches of a latent."""
        fields = self.on_meta().config
        return (fields.sample_size // fields.patch_size) ** 2
