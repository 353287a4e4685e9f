"""The interface of a checkpoint's tensors: name, dtype, shape and bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights that can be converted, by their names in safetensors."""
INTEGERS: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of buffers such as position ids, which are copied unchanged, by their names in safetensors."""
STORED = DTYPES | INTEGERS
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of one stored tensor."""

    name: str
    dtype: str
    """Name of the dtype in safetensors, a key of `STORED`."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * STORED[self.dtype].itemsize

    @property
    def is_integer(self) -> bool:
        """True if the tensor contains integers, so that it is a buffer and not a weight."""
        return self.dtype in INTEGERS

    def dtype_in(self, dtype: str | None) -> str:
        """Return the tensor's dtype in a checkpoint whose weights are cast to `dtype`; None keeps all dtypes."""
        # Biases of routers keep their dtype: small differences between them decide which experts are selected.
        return self.dtype if dtype is None or self.is_integer or self.name.endswith(EXPERT_BIAS) else dtype


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, row-major; a contiguous tensor is not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def shard_names(entries: Mapping[str, Entry], maximum: int) -> dict[str, list[str]]:
    """Group tensors into shards of at most `maximum` bytes; return file name -> tensor names."""
    return split_state_dict_into_shards_factory(
        dict(entries),
        get_storage_size=lambda entry: entry.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=maximum,
    ).filename_to_tensors


class TensorStore(Protocol):
    """Tensors of a checkpoint, read one at a time."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by name."""

    @property
    def shards(self) -> Mapping[str, list[str]]:
        """File name -> tensor names, both in order."""

    @property
    def paths(self) -> list[Path]:
        """The folder or the files of the checkpoint, which must not change during a conversion."""

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype."""

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of one tensor, little-endian and row-major, about a megabyte at a time."""


def checked_entry(store: TensorStore, name: str, shape: tuple[int, ...]) -> Entry:
    """Return the entry of a tensor; `ConversionError` if it is missing or does not have the `shape` of the config."""
    entry = store.entries.get(name)
    if entry is None:
        message = f"the tensor {name} is missing: the config requires it with the shape {list(shape)}"
        if name == "lm_head.weight":
            message += "; a model of another task, such as a classifier or an embedding model, has none"
        raise ConversionError(message)
    if entry.shape != shape:
        raise ConversionError(
            f"the tensor {name} has the shape {list(entry.shape)}, but the config requires {list(shape)}"
        )
    return entry


def stored_dtype(store: TensorStore) -> torch.dtype:
    """Return the dtype of the largest tensor that contains no integers."""
    weights = [entry for entry in store.entries.values() if not entry.is_integer]
    if not weights:
        raise ConversionError("the checkpoint has no weights: every tensor contains integers")
    return DTYPES[max(weights, key=lambda entry: entry.size).dtype]
