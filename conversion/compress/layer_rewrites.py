"""Layers with changed attention tensors: the names, and a function that computes a layer's new tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from crosshead.common.errors import ConversionError

from ..architectures.families import layer_prefix
from ..sources.tensor_store import TensorStore

Tensors = dict[str, torch.Tensor]
ATTENTION = "self_attn."


def read_attention(store: TensorStore, layer: int) -> Tensors:
    """The attention tensors of one layer, at least float32, by their names within the layer's attention."""
    prefix = layer_prefix(layer) + ATTENTION
    names = [name for name, entry in store.entries.items() if name.startswith(prefix) and not entry.is_integer]
    stored = {name.removeprefix(prefix): store.read(name) for name in names}
    for name, tensor in stored.items():
        if not tensor.isfinite().all():
            raise ConversionError(f"tensor {prefix}{name} holds nan or inf: repair the checkpoint or take another")
    return {name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in stored.items()}


def full_names(layer: int, tensors: Tensors) -> Tensors:
    """The same tensors by their names in the model."""
    return {f"{layer_prefix(layer)}{ATTENTION}{name}": tensor for name, tensor in tensors.items()}


@contextmanager
def substituted(attention: nn.Module, tensors: Tensors) -> Iterator[None]:
    """An attention layer with other values in some of its parameters, for as long as the context."""
    own = {name: attention.get_parameter(name).data for name in tensors}
    for name, tensor in tensors.items():
        attention.get_parameter(name).data = tensor.to(own[name])
    yield
    for name, tensor in own.items():
        attention.get_parameter(name).data = tensor


@dataclass
class LayerRewrites:
    """New tensors by name, made a layer at a time; the last layer made is kept."""

    layers: Mapping[str, int]
    """Name of a tensor that is rewritten or created -> the layer it comes with."""
    make: Callable[[int], Tensors]
    """Layer -> its new tensors by full name."""
    _last: tuple[int, Tensors] = field(default=(-1, {}))

    def tensor(self, name: str) -> torch.Tensor:
        """One new tensor."""
        layer = self.layers[name]
        if self._last[0] != layer:
            self._last = (-1, {})  # two layers at a time would be one too many
            made = self.make(layer)
            for name_made, tensor in made.items():
                if not tensor.isfinite().all():
                    raise ConversionError(
                        f"{name_made} came out as nan or inf, though the source is sound: report this"
                    )
            self._last = (layer, made)
        return self._last[1][name]
