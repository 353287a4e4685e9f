"""A local checkpoint folder as a store of tensors: one safetensors file, or an index and its shards.

The header of a file (eight bytes of length, then JSON) is read and checked here before any data is touched, because
the safetensors library maps whole files into memory. It refuses what the library refuses, and number formats that
cannot be converted.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from crosshead.common.checked_json import parse_object, read_object, shown
from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import Buffers, chunks_at, fill, opened, read_at

from .tensor_store import STORED, Entry

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST_NAME = 255
METADATA = "__metadata__"
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000
"""The safetensors library's own limit."""
_LARGEST_FILE = 2**63
_MAX_DIMENSIONS = 64  # torch's limit


@dataclass(frozen=True)
class Header:
    """What a file says it holds."""

    entries: dict[str, Entry]
    """In the order of their bytes."""
    starts: dict[str, int]
    """Tensor name -> where its bytes begin in the file."""
    identity: str
    """Changes when the file's size, its time of writing or its header does."""


@dataclass(frozen=True)
class _Slot:
    """One tensor and the bytes that it claims, counted from the end of the header."""

    entry: Entry
    begin: int
    end: int


def read_header(path: Path) -> Header:
    """The checked header of a safetensors file, or one line on what is wrong with the file."""
    with opened(path) as (descriptor, status):
        size = status.st_size
        if size < LENGTH_BYTES:
            raise ConversionError(f"{path} has {size} bytes, too few for a safetensors file: fetch it again")
        length = int.from_bytes(read_at(descriptor, path, 0, LENGTH_BYTES), "little")
        if length > LONGEST_HEADER:
            raise ConversionError(f"{path} claims a header of {length} bytes: it is damaged or not a safetensors file")
        start = LENGTH_BYTES + length
        if start > size:
            raise ConversionError(f"{path} is cut off: {size} bytes, its header alone needs {start}; fetch it again")
        raw = read_at(descriptor, path, LENGTH_BYTES, length)
    slots = _slots(path, parse_object(raw, f"the header of {path}"))
    _check_layout(path, slots, start, size)
    identity = hashlib.sha256(f"{size} {status.st_mtime_ns} ".encode() + raw).hexdigest()
    starts = {slot.entry.name: start + slot.begin for slot in slots}
    return Header({slot.entry.name: slot.entry for slot in slots}, starts, identity)


def _slots(path: Path, content: dict[str, Any]) -> list[_Slot]:
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConversionError(f"{path} has {METADATA}={shown(metadata)}: it must be an object of strings")
    if not content:
        raise ConversionError(f"{path} holds no tensors: give a checkpoint with weights")
    slots = [_slot(f"{path}: tensor {shown(name)}", name, value) for name, value in content.items()]
    return sorted(slots, key=lambda slot: (slot.begin, slot.end))


def _slot(where: str, name: str, value: Any) -> _Slot:
    if not name.isprintable():
        raise ConversionError(f"{where} has a name with characters that cannot be printed: rename it")
    if not isinstance(value, dict):
        raise ConversionError(f"{where} is described by {shown(value)}: it must be an object")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in STORED:
        raise ConversionError(f"{where} has dtype={shown(dtype)}: only {', '.join(STORED)} can be converted")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ConversionError(f"{where} has shape={shown(shape)}: it must be a list of sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise ConversionError(f"{where} has data_offsets={shown(offsets)}: they must be two positions, begin and end")
    # Beside a size of zero, absurd sizes would give zero bytes, and an overflow in torch.
    if prod(filter(None, shape)) * STORED[dtype].itemsize >= _LARGEST_FILE:
        raise ConversionError(f"{where} has shape={shown(shape)}: no computer holds that")
    slot = _Slot(Entry(name, dtype, tuple(shape)), offsets[0], offsets[1])
    if slot.end - slot.begin != slot.entry.size:
        raise ConversionError(
            f"{where} has data_offsets={shown(offsets)}, but {slot.entry.size} bytes by shape={shown(shape)}, {dtype}"
        )
    return slot


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _LARGEST_FILE for item in value)


def _check_layout(path: Path, slots: list[_Slot], start: int, size: int) -> None:
    position = 0
    for slot in slots:
        if slot.begin != position:
            fault = "overlaps the one before it" if slot.begin < position else "leaves a hole before it"
            raise ConversionError(
                f"{path}: tensor {shown(slot.entry.name)} begins at {slot.begin} where {position} is next: it {fault}"
            )
        position = slot.end
    if size < start + position:
        raise ConversionError(f"{path} is cut off: {size} bytes of {start + position}; fetch it again")
    if size > start + position:
        raise ConversionError(f"{path} has {size} bytes, its tensors end at {start + position}: it is damaged")


class SafetensorsStore:
    """The tensors of a checkpoint folder, everything about them checked when it is made; files are opened per read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, [folder]
        self._headers = _headers(folder)
        self._buffers = Buffers()
        self.entries: dict[str, Entry] = {}
        self.shards: dict[str, list[str]] = {}
        self._files: dict[str, str] = {}
        for file, header in self._headers.items():
            self.entries |= header.entries
            self.shards[file] = list(header.entries)
            self._files |= dict.fromkeys(header.entries, file)

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype, in memory of its own."""
        entry, (path, start) = self.entries[name], self._place(name)
        raw = torch.empty(entry.size, dtype=torch.uint8)
        with opened(path) as (descriptor, _):
            fill(raw.numpy().data, descriptor, path, start)
        return raw.view(STORED[entry.dtype]).view(entry.shape)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor in pieces, each good until the next is asked for."""
        path, start = self._place(name)
        return chunks_at(path, start, self.entries[name].size, self._buffers)

    def fingerprint(self) -> str:
        """A cheap identity of the weights: of each file its name, size, time of writing and header."""
        lines = [f"{file} {header.identity}\n" for file, header in self._headers.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _place(self, name: str) -> tuple[Path, int]:
        file = self._files[name]
        return self.folder / file, self._headers[file].starts[name]


def _headers(folder: Path) -> dict[str, Header]:
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise ConversionError(f"{folder} cannot be read as a folder: {error.strerror}") from error
    if WEIGHTS in names:  # where both are there, transformers too takes the single file
        return {WEIGHTS: read_header(folder / WEIGHTS)}
    if INDEX in names:
        return _indexed_headers(folder)
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise ConversionError(
            f"{folder} holds its weights as a pickle ({pickles[0]!r}), which is not read because it can run code: "
            "if you trust it, load it with transformers, save it with save_pretrained, and convert what that writes"
        )
    raise ConversionError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: give the folder of a checkpoint")


def _indexed_headers(folder: Path) -> dict[str, Header]:
    index = folder / INDEX
    files = read_index(index)
    headers = {}
    for file in sorted(set(files.values())):
        header = headers[file] = read_header(folder / file)
        listed = {name for name, its_file in files.items() if its_file == file}
        for name in sorted(listed - header.entries.keys()):
            raise ConversionError(f"{index} puts tensor {shown(name)} in {shown(file)}, which does not hold it")
        for name in sorted(header.entries.keys() - listed):
            place = f"puts it in {shown(files[name])}" if name in files else "does not list it"
            raise ConversionError(f"{folder / file} holds tensor {shown(name)}, but {INDEX} {place}")
    return headers


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    files = read_object(index, LONGEST_HEADER, "an index").get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConversionError(f"{index} has weight_map={shown(files)}: it must say which file holds which tensor")
    for name, file in files.items():
        if not _is_plain(file):
            raise ConversionError(
                f"{index} puts tensor {shown(name)} in {shown(file)}: use the name of a safetensors file beside it"
            )
    return files


def _is_plain(file: object) -> bool:
    """Whether it names a file in the same folder: never a path out of it."""
    if not isinstance(file, str) or len(file) > _LONGEST_NAME or not file.isprintable():
        return False
    return Path(file).name == file and file.endswith(".safetensors")
