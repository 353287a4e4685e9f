"""The config of a DiT, the diffusion transformer of diffusers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from crosshead.common.errors import EvalError, one_line

CLASSES = ("DiTTransformer2DModel", "CrossheadDiTTransformer2DModel", "Transformer2DModel")
"""The `_class_name` of a config without and with mechanisms, and the older one of published DiT models."""


@dataclass(frozen=True)
class DiTConfig:
    """The content of a config.json of diffusers, and the mechanisms, which replace those of the content."""

    content: Mapping[str, Any]
    mixers: dict[str, Any] = field(default_factory=dict)
    model_type: ClassVar[str] = "dit"
    dtype: ClassVar[None] = None

    @classmethod
    def read(cls, content: Mapping[str, Any], name: str) -> "DiTConfig":
        """Check and complete the config of the model `name`."""
        if content.get("_class_name") not in CLASSES:
            raise EvalError(f"{name} has _class_name={content.get('_class_name')!r}: use {' or '.join(CLASSES)}")
        try:
            return cls(content).with_mixers(content.get("mixers") or {})
        except ImportError:
            raise
        except Exception as error:  # diffusers checks few values; torch or Python raises for the others
            raise EvalError(f"config.json of {name} cannot be used: {one_line(error)}") from error

    def with_mixers(self, mixers: dict[str, Any]) -> "DiTConfig":
        """Return this config with other mechanisms, and the defaults of their options."""
        model = replace(self, mixers=mixers).on_meta()
        return replace(self, mixers=model.mixers)

    def on_meta(self) -> Any:
        """Create the model on the meta device."""
        from crosshead.modeling.dit import CrossheadDiTTransformer2DModel  # needs diffusers

        with torch.device("meta"):
            return CrossheadDiTTransformer2DModel.from_config(self.content, mixers=self.mixers).eval()

    @property
    def tokens(self) -> int:
        """Number of patches of a latent."""
        fields = self.on_meta().config
        return (fields.sample_size // fields.patch_size) ** 2
