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
    """The content of a config.json of diffusers, and the options of the mechanisms."""

    content: Mapping[str, Any]
    mixers: dict[str, Any] = field(default_factory=dict)
    model_type: ClassVar[str] = "dit"
    dtype: ClassVar[None] = None

    @classmethod
    def read(cls, content: Mapping[str, Any], mixers: dict[str, Any] | None = None) -> "DiTConfig":
        """Check and complete a config; `mixers` replaces the mechanisms in the file."""
        options = (content.get("mixers") or {}) if mixers is None else mixers
        stock = {name: value for name, value in content.items() if name != "mixers"}
        return cls(stock, cls(stock, options).on_meta().mixers)

    def on_meta(self) -> Any:
        """Create the model on the meta device."""
        from crosshead.modeling.dit import CrossheadDiTTransformer2DModel  # needs diffusers

        with torch.device("meta"):
            return CrossheadDiTTransformer2DModel.from_config(self.content, mixers=self.mixers).eval()

    def layouts(self) -> list[HeadLayout]:
        """Return the shape of attention in each block."""
        return self.on_meta().layouts()

    @property
    def tokens(self) -> int:
        """Number of patches of a latent."""
        fields = self.on_meta().config
        return (fields.sample_size // fields.patch_size) ** 2
