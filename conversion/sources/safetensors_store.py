"""Reads the tensors of a local safetensors checkpoint: one file, or an index and its shards.

The header of a file (eight bytes with its length, then JSON) is parsed here, because the safetensors library maps
whole files into memory. It is checked before any data is read: everything that the library checks, and that all
dtypes can be converted.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from crosshead.common.checked_json import parse_object, quoted, read_object
from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import chunks_at, fill, open_regular_file, read_at

from .tensor_store import STORED, Entry

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"
LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Maximum size of a header in bytes, as in the safetensors library."""
_MAX_NAME = 255
_MAX_BYTES = 2**63
_MAX_DIMENSIONS = 64  # torch's limit
OLDER_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Endings of tensor names in the first BERT checkpoints -> the present endings. transformers renames them as well."""
OUTPUT_HEAD = "lm_head."
"""Beginning of the names of a decoder's tensors that do not belong to its base model."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    tensors: dict[str, tuple[int, Entry]]
    """Tensor name -> offset of its first byte in the file, and its entry, in the order of the tensors' bytes."""
    fingerprint: str
    """Hash of the file's size, modification time and header."""


_Span = tuple[int, int, Entry]
"""Begin and end of a tensor's bytes, relative to the end of the header, and its entry."""


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; `ConversionError` if the file is damaged."""
    with open_regular_file(path) as (descriptor, status):
        size = status.st_size
        if size < LENGTH_BYTES:
            raise ConversionError(f"{path} has {size} bytes, too few for a safetensors file: download it again")
        length = int.from_bytes(read_at(descriptor, path, 0, LENGTH_BYTES), "little")
        if length > MAX_HEADER:
            raise ConversionError(f"{path} has a header of {length} bytes: it is damaged or not a safetensors file")
        start = LENGTH_BYTES + length
        if start > size:
            raise ConversionError(
                f"{path} is truncated: it has {size} bytes, its header alone needs {start}; download it again"
            )
        raw = read_at(descriptor, path, LENGTH_BYTES, length)
    spans = _parse_header(path, parse_object(raw, f"the header of {path}"))
    _check_layout(path, spans, start, size)
    fingerprint = hashlib.sha256(f"{size} {status.st_mtime_ns} ".encode() + raw).hexdigest()
    return Header({entry.name: (start + begin, entry) for begin, _, entry in spans}, fingerprint)


def _parse_header(path: Path, content: dict[str, Any]) -> list[_Span]:
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConversionError(f"{path} has {METADATA}={quoted(metadata)}: it must be an object of strings")
    if not content:
        raise ConversionError(f"{path} contains no tensors: give a checkpoint with weights")
    spans = [_parse_tensor(f"{path}: tensor {quoted(name)}", name, value) for name, value in content.items()]
    return sorted(spans, key=lambda span: span[:2])


def _parse_tensor(where: str, name: str, value: Any) -> _Span:
    if not name.isprintable():
        raise ConversionError(f"{where} has a name with unprintable characters: rename it")
    if not isinstance(value, dict):
        raise ConversionError(f"{where} is described by {quoted(value)}: it must be an object")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in STORED:
        raise ConversionError(f"{where} has dtype={quoted(dtype)}: only {', '.join(STORED)} can be converted")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ConversionError(f"{where} has shape={quoted(shape)}: it must be a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ConversionError(f"{where} has data_offsets={quoted(offsets)}: it must be a list of begin and end")
    # Zeros are left out of the product: a huge shape with a zero in it has zero bytes, but overflows in torch.
    if prod(filter(None, shape)) * STORED[dtype].itemsize >= _MAX_BYTES:
        raise ConversionError(f"{where} has shape={quoted(shape)}: it is too large for any computer")
    (begin, end), entry = offsets, Entry(name, dtype, tuple(shape))
    if end - begin != entry.size:
        raise ConversionError(
            f"{where} has data_offsets={quoted(offsets)}, but shape={quoted(shape)} in {dtype} needs "
            f"{entry.size} bytes"
        )
    return begin, end, entry


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_BYTES for item in value)


def _check_layout(path: Path, spans: list[_Span], start: int, size: int) -> None:
    position = 0
    for begin, end, entry in spans:
        if begin != position:
            fault = "overlaps the previous tensor" if begin < position else "leaves a gap before it"
            raise ConversionError(
                f"{path}: tensor {quoted(entry.name)} begins at {begin} instead of {position}: it {fault}"
            )
        position = end
    if size < start + position:
        raise ConversionError(f"{path} is truncated: it has {size} bytes of {start + position}; download it again")
    if size > start + position:
        raise ConversionError(f"{path} has {size} bytes, but its tensors end at {start + position}: it is damaged")


class SafetensorsStore:
    """The tensors of a checkpoint folder, as a `TensorStore`.

    The headers are read and checked once, at the start. The files are opened again for each read.
    """

    def __init__(self, folder: Path, base: str = "") -> None:
        """`base` begins the names of a decoder's tensors; it is added if no name has it, as transformers does."""
        self.folder, self.paths = folder, [folder]
        self.entries: dict[str, Entry] = {}
        self.shards: dict[str, list[str]] = {}
        self._locations: dict[str, tuple[Path, int]] = {}
        lines = []
        headers = _read_headers(folder)
        if any(name.startswith(base) for header in headers.values() for name in header.tensors):
            base = ""
        for file, header in headers.items():
            tensors = {_present_name(name, base): tensor for name, tensor in header.tensors.items()}
            self.entries |= {name: replace(entry, name=name) for name, (_, entry) in tensors.items()}
            self.shards[file] = list(tensors)
            self._locations |= {name: (folder / file, start) for name, (start, _) in tensors.items()}
            lines.append(f"{file} {header.fingerprint}\n")
        self._fingerprint = hashlib.sha256("".join(lines).encode()).hexdigest()

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in its stored dtype, in memory of its own."""
        entry, (path, start) = self.entries[name], self._locations[name]
        raw = torch.empty(entry.size, dtype=torch.uint8)
        with open_regular_file(path) as (descriptor, _):
            fill(raw.numpy().data, descriptor, path, start)
        return raw.view(STORED[entry.dtype]).view(entry.shape)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Return an iterator over the bytes of one tensor in chunks; each is valid until the next is requested."""
        path, start = self._locations[name]
        return chunks_at(path, start, self.entries[name].size)

    def fingerprint(self) -> str:
        """Return a cheap fingerprint of the weights: a hash of names, sizes, modification times and headers."""
        return self._fingerprint


def _present_name(name: str, base: str) -> str:
    """Return the present name of a tensor, which may be stored under an older name or without the base's name."""
    if not name.startswith(OUTPUT_HEAD):
        name = base + name
    for old, new in OLDER_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _read_headers(folder: Path) -> dict[str, Header]:
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise ConversionError(f"{folder} cannot be read as a folder: {error.strerror}") from error
    if WEIGHTS in names:  # transformers prefers the single file, too
        return {WEIGHTS: read_header(folder / WEIGHTS)}
    if INDEX in names:
        return _read_indexed_headers(folder)
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise ConversionError(
            f"{folder} has its weights as a pickle ({pickles[0]!r}), which is not read because it can run code: "
            "if you trust it, load it with transformers, save it with save_pretrained, and convert the new folder"
        )
    if shards := sorted(name for name in names if "-of-" in name and name.endswith(".safetensors")):
        raise ConversionError(f"{folder} has {shards[0]}, but no {INDEX}: copy the index of its shards, too")
    raise ConversionError(f"{folder} has neither {WEIGHTS} nor {INDEX}: give the folder of a checkpoint")


def _read_indexed_headers(folder: Path) -> dict[str, Header]:
    index = folder / INDEX
    files = read_index(index)
    headers = {}
    for file in sorted(set(files.values())):
        header = headers[file] = read_header(folder / file)
        listed = {name for name, its_file in files.items() if its_file == file}
        for name in sorted(listed - header.tensors.keys()):
            raise ConversionError(f"{index} lists tensor {quoted(name)} in {quoted(file)}, which does not contain it")
        for name in sorted(header.tensors.keys() - listed):
            fault = f"lists it in {quoted(files[name])}" if name in files else "does not list it"
            raise ConversionError(f"{folder / file} contains tensor {quoted(name)}, but {INDEX} {fault}")
    return headers


def read_index(index: Path) -> dict[str, str]:
    """Read and check an index; return its map of tensor name -> file name."""
    files = read_object(index, MAX_HEADER, "an index").get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConversionError(f"{index} has weight_map={quoted(files)}: it must map tensors to files")
    for name, file in files.items():
        if not _is_file_name(file):
            raise ConversionError(
                f"{index} lists tensor {quoted(name)} in {quoted(file)}: use the name of a safetensors file in the "
                "same folder"
            )
    return files


def _is_file_name(file: object) -> bool:
    """True if `file` is the plain name of a safetensors file, not a path to another folder."""
    if not isinstance(file, str) or len(file) > _MAX_NAME or not file.isprintable():
        return False
    return Path(file).name == file and file.endswith(".safetensors")
