"""Layers with changed attention tensors: their names, and a function that computes a layer's new tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from crosshead.common.errors import ConversionError

from ..architectures.attention_names import AttentionNames
from ..architectures.families import INVERSE_FREQUENCIES
from ..sources.tensor_store import TensorStore

Tensors = dict[str, torch.Tensor]
"""Tensor name, or part (see `AttentionNames`) -> tensor."""
PROJECTIONS = {"key": "k_proj", "value": "v_proj"}
"""Side that may have component heads -> projection that computes its heads."""


def read_attention(store: TensorStore, names: AttentionNames) -> Tensors:
    """Return the attention tensors of one layer by part, in float32 or wider; without RoPE's frequencies."""
    floats = (name for name, entry in store.entries.items() if not entry.is_integer)
    parts = {name: names.part(name) for name in floats if not INVERSE_FREQUENCIES.fullmatch(name)}
    tensors = {part: store.read(name) for name, part in parts.items() if part is not None}
    for part, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ConversionError(
                f"tensor {names.stored(part)} contains nan or inf: repair the checkpoint or use another"
            )
    return {part: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for part, tensor in tensors.items()}


def combined(scalars: torch.Tensor, components: torch.Tensor) -> torch.Tensor:
    """Return heads (h, ...): component heads (h', ...) combined by scalars (h, h' / groups) within each group."""
    groups = len(components) // scalars.shape[1]
    blocks, grouped = (x.unflatten(0, (groups, -1)) for x in (scalars, components))
    return torch.einsum("gij,gj...->gi...", blocks, grouped).flatten(0, 1)


def as_stock(tensors: Tensors, groups: int) -> Tensors:
    """Return stock attention tensors that are equivalent to a layer's tensors with component heads."""
    stock = {name: tensor for name, tensor in tensors.items() if not name.startswith("mixers.")}
    for side, projection in PROJECTIONS.items():
        scalars = tensors[f"mixers.explicit.{side}.weight"]
        for name in stock.keys() & {f"{projection}.weight", f"{projection}.bias"}:
            components = stock[name].unflatten(0, (groups * scalars.shape[1], -1))
            stock[name] = combined(scalars, components).flatten(0, 1)
    return stock


@contextmanager
def substituted(attention: nn.Module, tensors: Tensors) -> Iterator[None]:
    """Return a context in which some parameters of an attention layer have other values."""
    original = {name: attention.get_parameter(name).data for name in tensors}
    for name, tensor in tensors.items():
        attention.get_parameter(name).data = tensor.to(original[name])
    try:
        yield
    finally:
        for name, tensor in original.items():
            attention.get_parameter(name).data = tensor


@dataclass
class LayerRewrites:
    """Rewritten and created tensors, computed one layer at a time; only the last computed layer is cached."""

    layers: Mapping[str, int]
    """Name of a rewritten or created tensor -> its layer."""
    compute: Callable[[int], Tensors]
    """Function that returns the new attention tensors of a layer, by checkpoint name."""
    _cached: tuple[int, Tensors] = field(default=(-1, {}))

    def tensor(self, name: str) -> torch.Tensor:
        """Return one new tensor; computes its layer if it is not cached."""
        layer = self.layers[name]
        if self._cached[0] != layer:
            self._cached = (-1, {})  # free the previous layer before the next one is computed
            tensors = {name: tensor for name, tensor in self.compute(layer).items() if name in self.layers}
            for key, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise ConversionError(
                        f"the conversion produced nan or inf in {key} from a finite source; please report this"
                    )
            self._cached = (layer, tensors)
        return self._cached[1][name]
