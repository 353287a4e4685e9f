"""Writes one safetensors file tensor by tensor, and checks and hashes each chunk.

The layout is that of the safetensors library: the header is padded with spaces to a multiple of eight bytes, and
tensors with larger item sizes come first, so that every tensor starts at a multiple of its item size.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path
from threading import Lock

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import CHUNK, chunks_at, open_regular_file, read_at

from ..architectures.families import Shapes
from ..compress.layer_rewrites import Tensors
from ..sources.safetensors_store import INDEX, LENGTH_BYTES, METADATA
from ..sources.tensor_store import DTYPE_NAMES, DTYPES, STORED, Entry

Item = tuple[Entry, Callable[[], Iterable[memoryview]]]
"""Entry of a tensor, and a function that yields chunks of whole elements; each is valid until the next one."""
_THREADS = 2


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


def write_shard(path: Path, items: Sequence[Item]) -> dict[str, str]:
    """Write one file and return tensor name -> CRC-32; NaN and infinity are errors."""
    producers = {entry.name: chunks for entry, chunks in items}
    entries = file_order(entry for entry, _ in items)
    with path.open("wb") as file:
        file.write(shard_header(entries))
        file.flush()
        lock, starts = Lock(), accumulate((entry.size for entry in entries), initial=file.tell())
        streams = (
            _Stream(file.fileno(), lock, start, entry, iter(producers[entry.name]()))
            for entry, start in zip(entries, starts, strict=False)
        )
        with _thread_pool() as pool:
            digests = _write_streams(streams, pool)
    return {entry.name: digests[entry.name] for entry in entries}


@contextmanager
def _thread_pool() -> Iterator[Executor]:
    """Yield a pool of writer threads with one torch thread each: more threads than cores would be slow."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(_THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


class _Stream:
    """State of one tensor that is being written."""

    def __init__(self, descriptor: int, lock: Lock, start: int, entry: Entry, chunks: Iterator[memoryview]) -> None:
        self.entry, self.chunks, self._lock = entry, chunks, lock
        self._descriptor, self._start, self._done, self._crc = descriptor, start, 0, 0

    def write(self, chunk: memoryview) -> None:
        """Check, hash and write the next chunk, mostly without the GIL."""
        if self._done + chunk.nbytes > self.entry.size:
            raise ConversionError(f"tensor {self.entry.name!r} came out as more than its {self.entry.size} bytes")
        check_finite(self.entry, chunk)
        self._crc = zlib.crc32(chunk, self._crc)
        with self._lock:  # the operating system serialises writes to a file, and waiting threads would spin
            _write_at(self._descriptor, chunk, self._start + self._done)
        self._done += chunk.nbytes

    def digest(self) -> str:
        """Return the CRC-32 of the complete tensor."""
        name, size = self.entry.name, self.entry.size
        if self._done != size:
            raise ConversionError(f"tensor {name!r} came out as {self._done} bytes instead of {size}")
        return f"{self._crc:08x}"


def _write_streams(streams: Iterator[_Stream], pool: Executor) -> dict[str, str]:
    """Write as many tensors at a time as there are threads, in file order; the chunks of a tensor are sequential."""
    digests: dict[str, str] = {}
    running: dict[Future[None], _Stream] = {}

    def proceed(stream: _Stream) -> None:
        chunk = next(stream.chunks, None)
        if chunk is None:
            digests[stream.entry.name] = stream.digest()
        else:
            running[pool.submit(stream.write, chunk)] = stream

    while True:
        while len(running) < _THREADS and (stream := next(streams, None)) is not None:
            proceed(stream)
        if not running:
            return digests
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            stream = running.pop(future)
            future.result()
            proceed(stream)


def check_finite(entry: Entry, chunk: memoryview | bytearray) -> None:
    """Raise `ConversionError` if a chunk of a tensor contains nan or infinity."""
    if entry.is_integer:
        return
    for extreme in torch.aminmax(torch.frombuffer(chunk, dtype=DTYPES[entry.dtype])):  # NaN if any value is NaN
        if not extreme.isfinite():
            value = extreme.item()
            raise ConversionError(f"tensor {entry.name!r} contains {value}: repair the checkpoint or use another")


def _write_at(descriptor: int, chunk: memoryview, start: int) -> None:
    while chunk:
        count = os.pwrite(descriptor, chunk, start)
        chunk, start = chunk[count:], start + count


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
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
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
        file.seek(0)
        file.write(reserved.to_bytes(LENGTH_BYTES, "little") + json.dumps(header).encode().ljust(reserved))
