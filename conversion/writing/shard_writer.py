"""Writes one safetensors file tensor by tensor, and checks and hashes each chunk.

The layout is that of the safetensors library: the header is padded with spaces to a multiple of eight bytes, and
tensors with larger item sizes come first, so that every tensor starts at a multiple of its item size.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import CHUNK, chunks_at, open_regular_file, read_at

from ..architectures.families import Shapes
from ..compress.layer_rewrites import Tensors
from ..sources.safetensors_store import INDEX, LENGTH_BYTES, METADATA
from ..sources.tensor_store import DTYPE_NAMES, DTYPES, STORED, Entry, tensor_bytes


def file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the order of a file: as given, but larger item sizes first."""
    return sorted(entries, key=lambda entry: -STORED[entry.dtype].itemsize)


def shard_header(entries: Iterable[Entry]) -> bytes:
    """Return the length field and the JSON header of a file with these tensors."""
    content: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for entry in file_order(entries):
        begin, end = end, end + entry.size
        content[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def shard_size(entries: Sequence[Entry]) -> int:
    """Return the size in bytes of a file with these tensors."""
    return len(shard_header(entries)) + sum(entry.size for entry in entries)


def write_shard(path: Path, items: Sequence[tuple[Entry, Callable[[], Iterable[memoryview]]]]) -> dict[str, str]:
    """Write one file and return tensor name -> CRC-32; NaN and infinity are errors.

    An item is a tensor's entry, and a function that yields chunks of whole elements; each is valid until the next one.
    """
    producers = {entry.name: chunks for entry, chunks in items}
    entries = file_order(entry for entry, _ in items)
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(shard_header(entries))
        return {entry.name: _write_tensor(file, pool, entry, producers[entry.name]()) for entry in entries}


def _write_tensor(file: BinaryIO, pool: Executor, entry: Entry, chunks: Iterable[memoryview]) -> str:
    """Write one tensor, check its chunks meanwhile, and return its CRC-32."""
    size = crc = 0
    for chunk in chunks:
        size += chunk.nbytes
        if size > entry.size:
            raise ConversionError(f"tensor {entry.name!r} came out as more than its {entry.size} bytes")
        writing = pool.submit(file.write, chunk)
        check_finite(entry, chunk)
        crc = zlib.crc32(chunk, crc)
        writing.result()
    if size != entry.size:
        raise ConversionError(f"tensor {entry.name!r} came out as {size} bytes instead of {entry.size}")
    return f"{crc:08x}"


def check_finite(entry: Entry, chunk: memoryview | bytearray) -> None:
    """Raise `ConversionError` if a chunk of a tensor contains nan or infinity."""
    if entry.is_integer:
        return
    values, threads = torch.frombuffer(chunk, dtype=DTYPES[entry.dtype]), torch.get_num_threads()
    torch.set_num_threads(1)  # a chunk is small: to wait for further threads takes longer, above all on busy cores
    try:
        extremes = torch.aminmax(values)  # NaN if any value is NaN
    finally:
        torch.set_num_threads(threads)
    for extreme in extremes:
        if not extreme.isfinite():
            value = extreme.item()
            raise ConversionError(f"tensor {entry.name!r} contains {value}: repair the checkpoint or use another")


def digest_of(chunks: Iterable[memoryview]) -> str:
    """Return the CRC-32 of a tensor's bytes, as `write_shard` returns it."""
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def is_intact(path: Path, entries: Sequence[Entry], digests: Mapping[str, str]) -> bool:
    """True if a file is, byte for byte, the one for which `write_shard` returned these digests."""
    header = shard_header(entries)
    with open_regular_file(path) as (descriptor, status):
        if status.st_size != shard_size(entries) or read_at(descriptor, path, 0, len(header)) != header:
            return False
    start = len(header)
    for entry in file_order(entries):
        if digests.get(entry.name) != digest_of(chunks_at(path, start, entry.size)):
            return False
        start += entry.size
    return True


def tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, row-major, in chunks that share its memory."""
    raw = tensor_bytes(tensor.detach().cpu())
    for start in range(0, len(raw), CHUNK):
        yield raw[start : start + CHUNK]


def whole_rows(chunks: Iterable[memoryview], size: int) -> Iterator[bytearray]:
    """Regroup chunks into blocks of complete rows of `size` bytes each; a block has about a megabyte."""
    length = max(1, CHUNK // size) * size
    pending = bytearray()
    for chunk in chunks:
        pending += chunk
        while len(pending) >= length:
            yield pending[:length]
            pending = pending[length:]
    if pending:
        yield pending


def rounded(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return the tensor in the dtype of `entry`; `ConversionError` if finite values overflow."""
    result = tensor.to(DTYPES[entry.dtype])
    if tensor.isfinite().all() and not result.isfinite().all():
        raise ConversionError(f"tensor {entry.name} overflows in {DTYPES[entry.dtype]}: use --dtype bfloat16")
    return result


def write_index(folder: Path, shards: Mapping[str, Sequence[Entry]]) -> None:
    """Write the index of a sharded checkpoint in the format of transformers."""
    files = {entry.name: file for file, entries in shards.items() for entry in entries}
    entries = [entry for group in shards.values() for entry in group]
    totals = {
        "total_parameters": sum(prod(entry.shape) for entry in entries),
        "total_size": sum(entry.size for entry in entries),
    }
    text = json.dumps({"metadata": totals, "weight_map": files}, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


MAX_TENSOR_FIELDS = 128
"""Maximum number of bytes of a tensor's dtype, shape and offsets in the header."""
MAX_METADATA = 1024
"""Maximum number of bytes of the metadata in the header."""


def write_streamed(path: Path, expected: Shapes, groups: Iterable[Tensors], metadata: Mapping[str, str]) -> None:
    """Write groups of tensors to one file, with one group in memory at a time; `expected` contains all tensor names.

    The header comes first, but is known last: space for its maximum size is reserved, and padded with spaces, which
    the format allows.
    """
    reserved = sum(len(name) + MAX_TENSOR_FIELDS for name in expected) + MAX_METADATA
    reserved += -reserved % LENGTH_BYTES
    header: dict[str, object] = {}
    end = 0
    with path.open("wb") as file:
        file.seek(LENGTH_BYTES + reserved)
        for tensors in groups:
            for name, tensor in tensors.items():
                begin, end = end, end + tensor.nbytes
                dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
                for chunk in tensor_chunks(tensor):
                    file.write(chunk)
        header[METADATA] = dict(metadata)
        text = json.dumps(header).encode()
        if len(text) > reserved:
            raise ConversionError(
                f"{path} needs {len(text)} bytes for its header, but {reserved} are reserved; please report this"
            )
        file.seek(0)
        file.write(reserved.to_bytes(LENGTH_BYTES, "little") + text.ljust(reserved))
