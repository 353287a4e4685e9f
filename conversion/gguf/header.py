"""The header of a GGUF file, which may come in parts: metadata, then a table of tensors.

Our own parser, because the `gguf` package maps the whole file, takes seconds for the vocabulary's strings, and loops
where a length is damaged. The package still knows the number formats and undoes the quantisation.
"""

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from crosshead.common.checked_json import shown
from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import opened

_PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata types of a fixed size, as `struct` writes them."""
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 100_000_000
_MOST_DIMENSIONS = 4
_MOST_BYTES = 2**63


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored."""

    path: Path
    start: int
    """Of its bytes in the file."""
    format: Any
    """A `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch."""
    size: int
    """Bytes in the file."""


@dataclass(frozen=True)
class GgufFile:
    """What the headers of all parts say."""

    paths: list[Path]
    metadata: dict[str, Any]
    """Of the first part. Of a list, only its length is kept, in words."""
    tensors: dict[str, GgufTensor]


def parts_of(path: Path) -> list[Path]:
    """The files that a GGUF file, by its name, is one of."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, int(match["count"]) + 1)
    return [path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf") for number in numbers]


def read_gguf(path: Path) -> GgufFile:
    """The checked headers of a GGUF file and, where it is one part of several, of the others."""
    paths = parts_of(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for part in paths:
        said, held = _read_part(part)
        metadata = metadata or said
        if said.get("split.count", len(paths)) not in (0, len(paths)):
            raise ConversionError(
                f"{part} is one of {shown(said['split.count'])} parts: put all of them there, as x-00001-of-00002.gguf"
            )
        if twice := sorted(tensors.keys() & held.keys()):
            raise ConversionError(f"{part} holds tensor {shown(twice[0])} a second time: fetch it again")
        tensors |= held
    if not tensors:
        raise ConversionError(f"{path} holds a vocabulary and no tensors: give a GGUF file with weights")
    return GgufFile(paths, metadata, tensors)


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    with opened(path) as (descriptor, status), open(descriptor, "rb", closefd=False) as file:
        cursor = _Cursor(path, file, status.st_size)
        if cursor.take(4) != _MAGIC:
            raise ConversionError(f"{path} does not begin with {_MAGIC.decode()}: it is no GGUF file")
        (version,) = cursor.numbers("I")
        if version not in _VERSIONS:
            raise ConversionError(f"{path} is GGUF of version {version}: only 2 and 3, little-endian, can be read")
        tensor_count, metadata_count = cursor.numbers("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = cursor.text()
            metadata[key] = cursor.value(*cursor.numbers("I"))
        table = [_read_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ConversionError(f"{path} has general.alignment={shown(alignment)}: it must be a number of bytes")
    data = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, number, data + offset) for name, shape, number, offset in table}
    if len(tensors) < len(table):
        raise ConversionError(f"{path} holds two tensors of the same name: fetch it again")
    for name, tensor in tensors.items():
        if tensor.start + tensor.size > status.st_size:
            raise ConversionError(
                f"{path} is cut off: tensor {shown(name)} ends at byte {tensor.start + tensor.size} of "
                f"{status.st_size}; fetch it again"
            )
    return metadata, tensors


def _read_row(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the format, and offset of one tensor."""
    name = cursor.text()
    (dimensions,) = cursor.numbers("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ConversionError(f"{cursor.path}: tensor {shown(name)} has {dimensions} dimensions: fetch the file again")
    shape = tuple(reversed(cursor.numbers(f"{dimensions}Q")))
    number, offset = cursor.numbers("IQ")
    return name, shape, number, offset


def _tensor(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    where = f"{path}: tensor {shown(name)}"
    try:
        form = GGMLQuantizationType(number)
    except ValueError as error:
        raise ConversionError(
            f"{where} is stored in ggml's format {number}, which the gguf package does not know: upgrade it, or give "
            "a GGUF file in another format"
        ) from error
    block, block_size = GGML_QUANT_SIZES[form]
    if not name.isprintable() or min(shape) < 1 or shape[-1] % block or prod(shape) >= _MOST_BYTES:
        raise ConversionError(f"{where} has shape={list(shape)} in {form.name}, which cannot be: fetch the file again")
    return GgufTensor(path, start, form, shape, prod(shape) // block * block_size)


class _Cursor:
    """Reads a header from front to back and never past the end of its file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.position = 0
        self._file = file
        self._size = size

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._advance(count)
        return self._file.read(count)

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """The next numbers, in `struct`'s codes."""
        layout = struct.Struct(f"<{codes}")
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        """The next string."""
        (length,) = self.numbers("Q")
        if length > _LONGEST_STRING:
            raise ConversionError(f"{self.path} claims a string of {length} bytes: it is damaged, fetch it again")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConversionError(f"{self.path} holds a string that is not UTF-8: fetch it again") from error

    def value(self, kind: int) -> Any:
        """The next metadata value; of a list, only what it is."""
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ConversionError(f"{self.path} holds metadata of type {kind}, unknown in GGUF: fetch it again")
        kind, count = self.numbers("IQ")
        if kind in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self._skip(*self.numbers("Q"))
        else:
            raise ConversionError(f"{self.path} holds a list of type {kind} in its metadata, which cannot be read")
        return f"a list of {count}"

    def _skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(self.position)

    def _advance(self, count: int) -> None:
        self.position += count
        if self.position > self._size:
            raise ConversionError(f"{self.path} is cut off: {self._size} bytes end within its header; fetch it again")
