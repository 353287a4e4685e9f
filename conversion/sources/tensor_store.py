"""The interface of stored tensors: name, dtype, shape, bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The number formats that weights can be converted from, by their names in safetensors."""
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
"""The formats of buffers such as position ids, which are copied as they are."""
STORED = DTYPES | INTEGERS
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One stored tensor."""

    name: str
    dtype: str
    """A key of `STORED`."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * STORED[self.dtype].itemsize

    @property
    def is_integer(self) -> bool:
        """It holds integers, so it is no weight."""
        return self.dtype in INTEGERS

    def dtype_in(self, asked: str | None) -> str:
        """Its dtype in a checkpoint whose weights are to have the dtype `asked`."""
        return self.dtype if asked is None or self.is_integer else asked


class TensorStore(Protocol):
    """Tensors that are read one at a time, never all at once."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name."""

    @property
    def shards(self) -> Mapping[str, list[str]]:
        """The files they lie in, in order: file name -> tensor names, in the order of their bytes."""

    @property
    def places(self) -> list[Path]:
        """The folder or the files that must stay as they are."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype."""

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor, little-endian and row by row, a few megabytes at a time."""
