"""Layers with changed attention tensors: their names, and a function that computes a layer's new tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from crosshead.common.errors import ConversionError

from ..architectures.families import attention_prefix
from ..sources.tensor_store import TensorStore

Tensors = dict[str, torch.Tensor]


def read_attention(store: TensorStore, layer: int) -> Tensors:
    """The attention tensors of one layer in float32 or wider; their names are without the attention's prefix."""
    prefix = attention_prefix(layer)
    names = [name for name, entry in store.entries.items() if name.startswith(prefix) and not entry.is_integer]
    tensors = {name.removeprefix(prefix): store.read(name) for name in names}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ConversionError(f"tensor {prefix}{name} contains nan or inf: repair the checkpoint or use another")
    return {name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for name, tensor in tensors.items()}


@contextmanager
def substituted(attention: nn.Module, tensors: Tensors) -> Iterator[None]:
    """A context in which some parameters of an attention layer have other values."""
    original = {name: attention.get_parameter(name).data for name in tensors}
    for name, tensor in tensors.items():
        attention.get_parameter(name).data = tensor.to(original[name])
    yield
    for name, tensor in original.items():
        attention.get_parameter(name).data = tensor


@dataclass
class LayerRewrites:
    """New tensors, computed one layer at a time; only the last layer is cached."""

    layers: Mapping[str, int]
    """Name of a tensor that is rewritten or created -> its layer."""
    compute: Callable[[int], Tensors]
    """Layer -> its attention tensors, by names without the attention's prefix."""
    _cached: tuple[int, Tensors] = field(default=(-1, {}))

    def tensor(self, name: str) -> torch.Tensor:
        """One new tensor."""
        layer = self.layers[name]
        if self._cached[0] != layer:
            self._cached = (-1, {})  # free the previous layer before the next one is computed
            prefix = attention_prefix(layer)
            computed = {prefix + part: tensor for part, tensor in self.compute(layer).items()}
            tensors = {name: tensor for name, tensor in computed.items() if name in self.layers}
            for key, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise ConversionError(
                        f"the conversion produced nan or inf in {key} from a finite source; please report this"
                    )
            self._cached = (layer, tensors)
        return self._cached[1][name]
