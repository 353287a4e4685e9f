"""Tensors out of a GGUF file, some rows at a time: read, unpacked where they are quantised, rows in stock order."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .errors import ConversionError
from .file_bytes import CHUNK, fill, opened
from .gguf_header import GgufTensor
from .store import DTYPE_NAMES, DTYPES, Entry

UNPACKED = torch.float32
"""What the `gguf` package unpacks quantised numbers to."""


@dataclass(frozen=True)
class StockTensor:
    """One stock tensor and where its numbers lie: a whole tensor of the file, or one expert of a stack."""

    source: GgufTensor
    expert: int | None = None
    head_rows: int | None = None
    """Rows of one head, where they are interleaved: rotated pairs beside each other."""

    def entry(self, name: str) -> Entry:
        """What a store says of it."""
        dtype = DTYPES.get(self.source.format.name, UNPACKED)
        return Entry(name, DTYPE_NAMES[dtype], self.source.shape[self.expert is not None :])

    def blocks(self) -> Iterator[torch.Tensor]:
        """Consecutive rows, a few megabytes at a time and whole heads where rows are interleaved."""
        entry = self.entry("")
        rows, row_size = entry.shape[0], entry.size // entry.shape[0]
        packed = self.source.size // prod(self.source.shape[: len(self.source.shape) - len(entry.shape) + 1])
        unit = self.head_rows or 1
        step = max(1, CHUNK // (row_size * unit)) * unit
        start = self.source.start + (self.expert or 0) * rows * packed
        with opened(self.source.path) as (descriptor, _):
            for row in range(0, rows, step):
                count = min(step, rows - row)
                raw = torch.empty(count, packed, dtype=torch.uint8)
                fill(raw.numpy().data.cast("B"), descriptor, self.source.path, start + row * packed)
                yield self._in_order(unpack(raw, self.source.format)).view(count, *entry.shape[1:])

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        if self.head_rows is None:
            return rows
        # (heads, pairs, first and second, columns) -> (heads, first and second, pairs, columns)
        return rows.view(-1, self.head_rows // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def unpack(raw: torch.Tensor, form: Any) -> torch.Tensor:
    """Rows of bytes as rows of numbers."""
    if form.name in DTYPES:
        return raw.view(DTYPES[form.name])
    from gguf import dequantize

    return torch.from_numpy(dequantize(raw.numpy(), form))


def check_format(name: str, tensor: GgufTensor) -> None:
    """Refuse what cannot be unpacked, before anything is written."""
    if tensor.format.name in DTYPES:
        return
    from gguf import GGML_QUANT_SIZES

    try:
        if len(tensor.shape) < 2:
            raise NotImplementedError
        unpack(torch.zeros(1, GGML_QUANT_SIZES[tensor.format][1], dtype=torch.uint8), tensor.format)
    except NotImplementedError as error:
        raise ConversionError(
            f"{tensor.path}: tensor {name!r} of {len(tensor.shape)} dimensions is stored as {tensor.format.name}, "
            "which the gguf package cannot unpack: give a GGUF file in another format, such as Q8_0 or F16"
        ) from error
