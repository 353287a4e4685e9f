"""Parses the header of a GGUF file, which may be split into parts: metadata, then a table of tensors.

The `gguf` package is not used for this: it maps the whole file, takes seconds for the vocabulary's strings, and loops
on damaged lengths. It is used for the table of formats and for dequantising.
"""

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import open_regular_file

_PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata types of a fixed size -> their format codes in `struct`."""
_STRING, _ARRAY = 8, 9
_MAX_STRING = 100_000_000
_MAX_LIST = 10_000_000
_MAX_DIMENSIONS = 4
_MAX_SIZE = 2**63


@dataclass(frozen=True)
class GgufTensor:
    """Position, format and shape of a tensor in a GGUF file."""

    path: Path
    start: int
    """Offset of the first byte in the file."""
    format: Any
    """A `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    """Shape in the order of torch, outermost dimension first."""
    size: int
    """Size in the file in bytes."""


@dataclass(frozen=True)
class GgufFile:
    """The headers of all parts of a GGUF file."""

    paths: list[Path]
    metadata: dict[str, Any]
    """Metadata of the first part."""
    tensors: dict[str, GgufTensor]


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split GGUF file, given one of them."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, int(match["count"]) + 1)
    return [path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf") for number in numbers]


def read_gguf(path: Path) -> GgufFile:
    """Read and check the headers of a GGUF file and of its other parts."""
    paths = part_paths(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for part in paths:
        part_metadata, part_tensors = _read_part(part)
        metadata = metadata or part_metadata
        count = part_metadata.get("split.count", len(paths))
        if count not in (0, len(paths)):
            raise ConversionError(
                f"{part} is one of {quoted(count)} parts: put all of them into its folder, named as "
                "x-00001-of-00002.gguf"
            )
        if duplicates := sorted(tensors.keys() & part_tensors.keys()):
            raise ConversionError(
                f"{part} contains tensor {quoted(duplicates[0])} of an earlier part: download it again"
            )
        tensors |= part_tensors
    if not tensors:
        raise ConversionError(f"{path} contains a vocabulary but no tensors: give a GGUF file with weights")
    return GgufFile(paths, metadata, tensors)


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    with open_regular_file(path) as (descriptor, status), open(descriptor, "rb", closefd=False) as file:
        cursor = _Cursor(path, file, status.st_size)
        if cursor.take(4) != MAGIC:
            raise ConversionError(f"{path} does not begin with {MAGIC.decode()}: it is not a GGUF file")
        (version,) = cursor.numbers("I")
        if version not in _VERSIONS:
            raise ConversionError(
                f"{path} is GGUF of version {version}: only versions 2 and 3, little-endian, can be read"
            )
        tensor_count, metadata_count = cursor.numbers("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = cursor.text()
            metadata[key] = cursor.value(*cursor.numbers("I"))
        table = [_read_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ConversionError(
            f"{path} has general.alignment={quoted(alignment)}: it must be a positive number of bytes"
        )
    data = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, number, data + offset) for name, shape, number, offset in table}
    if len(tensors) < len(table):
        raise ConversionError(f"{path} contains two tensors with the same name: download it again")
    for name, tensor in tensors.items():
        if tensor.start + tensor.size > status.st_size:
            raise ConversionError(
                f"{path} is truncated: tensor {quoted(name)} ends at byte {tensor.start + tensor.size} of "
                f"{status.st_size}; download it again"
            )
    return metadata, tensors


def _read_row(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    """Read one row of the table of tensors: name, shape, number of the format, and offset."""
    name = cursor.text()
    (dimensions,) = cursor.numbers("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ConversionError(f"{cursor.path}: tensor {quoted(name)} has {dimensions} dimensions: download it again")
    shape = tuple(reversed(cursor.numbers(f"{dimensions}Q")))
    number, offset = cursor.numbers("IQ")
    return name, shape, number, offset


def _tensor(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    where = f"{path}: tensor {quoted(name)}"
    try:
        quantisation = GGMLQuantizationType(number)
    except ValueError as error:
        raise ConversionError(
            f"{where} has the ggml format {number}, which the gguf package does not know: upgrade the package, or "
            "give a GGUF file in another format"
        ) from error
    block, block_size = GGML_QUANT_SIZES[quantisation]
    if not name.isprintable() or min(shape) < 1 or shape[-1] % block or prod(shape) >= _MAX_SIZE:
        raise ConversionError(
            f"{where} has shape={list(shape)} in {quantisation.name}, which is impossible: download the file again"
        )
    return GgufTensor(path, start, quantisation, shape, prod(shape) // block * block_size)


@dataclass
class _Cursor:
    """Reads a header sequentially; `ConversionError` instead of reading past the end of the file."""

    path: Path
    file: BinaryIO
    size: int
    position: int = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self.position += count
        if self.position > self.size:
            raise ConversionError(
                f"{self.path} is truncated: it has {self.size} bytes, fewer than its header; download it again"
            )
        return self.file.read(count)

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """Return the next numbers, for format codes of `struct`."""
        layout = struct.Struct(f"<{codes}")
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        """Return the next string."""
        (length,) = self.numbers("Q")
        if length > _MAX_STRING:
            raise ConversionError(f"{self.path} has a string of {length} bytes: it is damaged, download it again")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConversionError(f"{self.path} contains a string that is not UTF-8: download it again") from error

    def value(self, kind: int) -> Any:
        """Return the next metadata value."""
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ConversionError(f"{self.path} has metadata of the unknown type {kind}: download it again")
        kind, count = self.numbers("IQ")
        if count > _MAX_LIST:
            raise ConversionError(f"{self.path} has a list of {count} values: it is damaged, download it again")
        if kind in _NUMBERS:
            return list(self.numbers(f"{count}{_NUMBERS[kind]}"))
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        raise ConversionError(f"{self.path} has a list of the unsupported type {kind} in its metadata")
