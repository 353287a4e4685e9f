"""The header of a safetensors file: eight bytes of length, then JSON; read and checked before any data is touched.

Our own parser, because the library maps whole files. It refuses what the library refuses, and number formats that
cannot be converted.
"""

import hashlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError

from .checked_json import parse_object, shown
from .file_bytes import opened, read_at
from .tensor_store import STORED, Entry

METADATA = "__metadata__"
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000
"""The safetensors library's own limit."""
_MOST_BYTES = 2**63
_MOST_DIMENSIONS = 64  # torch's limit


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
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ConversionError(f"{where} has shape={shown(shape)}: it must be a list of sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise ConversionError(f"{where} has data_offsets={shown(offsets)}: they must be two positions, begin and end")
    # Beside a size of zero, absurd sizes would give zero bytes, and an overflow in torch.
    if prod(filter(None, shape)) * STORED[dtype].itemsize >= _MOST_BYTES:
        raise ConversionError(f"{where} has shape={shown(shape)}: no computer holds that")
    slot = _Slot(Entry(name, dtype, tuple(shape)), offsets[0], offsets[1])
    if slot.end - slot.begin != slot.entry.size:
        raise ConversionError(
            f"{where} has data_offsets={shown(offsets)}, but {slot.entry.size} bytes by shape={shown(shape)}, {dtype}"
        )
    return slot


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MOST_BYTES for item in value)


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
