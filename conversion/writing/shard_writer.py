"""One safetensors file, written tensor by tensor: checked and hashed while it streams past.

The header's layout is the safetensors library's: padded with spaces to eight bytes, wider numbers first, so that
every tensor lies on a multiple of its item size.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from math import prod
from pathlib import Path
from threading import Lock

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import CHUNK, Buffers, chunks_at, opened, read_at

from ..architectures.families import Shapes
from ..compress.layer_rewrites import Tensors
from ..sources.safetensors_store import INDEX, LENGTH_BYTES, METADATA
from ..sources.tensor_store import DTYPE_NAMES, DTYPES, STORED, Entry

Item = tuple[Entry, Callable[[], Iterable[memoryview]]]
"""A tensor and what yields its bytes: pieces of whole elements, each good until the next is asked for."""
_THREADS = 2


def file_order(entries: Iterable[Entry]) -> list[Entry]:
    """The order in which tensors lie in their file: as given, but wider numbers first."""
    return sorted(entries, key=lambda entry: -STORED[entry.dtype].itemsize)


def shard_header(entries: Iterable[Entry]) -> bytes:
    """What the file of these tensors starts with."""
    content: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for entry in file_order(entries):
        begin, end = end, end + entry.size
        content[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def shard_size(entries: Sequence[Entry]) -> int:
    """Bytes of the whole file."""
    return len(shard_header(entries)) + sum(entry.size for entry in entries)


def write_shard(path: Path, items: Sequence[Item]) -> dict[str, str]:
    """Write one file of tensors and give each one's digest; a tensor that holds NaN or infinity is an error."""
    producers = {entry.name: chunks for entry, chunks in items}
    entries = file_order(entry for entry, _ in items)
    with path.open("wb") as file:
        file.write(shard_header(entries))
        file.flush()
        streams = _streams(file.fileno(), file.tell(), [(entry, producers[entry.name]) for entry in entries])
        with _workers() as pool:
            digests = _run(streams, pool)
    return {entry.name: digests[entry.name] for entry in entries}


@contextmanager
def _workers() -> Iterator[Executor]:
    """Threads beside the one that makes the pieces. Each computes alone: more threads than cores would be slow."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(_THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


class _Stream:
    """One tensor on its way into a file."""

    def __init__(self, descriptor: int, turn: Lock, start: int, entry: Entry, pieces: Iterator[memoryview]) -> None:
        self.entry, self.pieces, self._turn = entry, pieces, turn
        self._descriptor, self._start, self._done, self._total = descriptor, start, 0, 0

    def write(self, piece: memoryview) -> None:
        """Check, hash and write the next piece, which needs no GIL."""
        if self._done + piece.nbytes > self.entry.size:
            raise ConversionError(f"tensor {self.entry.name!r} came out as more than its {self.entry.size} bytes")
        _check_finite(self.entry, piece)
        self._total = zlib.crc32(piece, self._total)
        with self._turn:  # the system lets one in at a time, and has the others burn a core until then
            _write_at(self._descriptor, piece, self._start + self._done)
        self._done += piece.nbytes

    def digest(self) -> str:
        """Of the whole tensor."""
        name, size = self.entry.name, self.entry.size
        if self._done != size:
            raise ConversionError(f"tensor {name!r} came out as {self._done} bytes instead of {size}")
        return _digest(self._total)


def _streams(descriptor: int, start: int, items: Iterable[Item]) -> Iterator[_Stream]:
    turn = Lock()
    for entry, chunks in items:
        yield _Stream(descriptor, turn, start, entry, iter(chunks()))
        start += entry.size


def _run(streams: Iterator[_Stream], pool: Executor) -> dict[str, str]:
    """A few tensors at a time, begun in the order of the file; each piece is made when the one before is written."""
    digests: dict[str, str] = {}
    running: dict[Future[None], _Stream] = {}

    def proceed(stream: _Stream) -> None:
        piece = next(stream.pieces, None)
        if piece is None:
            digests[stream.entry.name] = stream.digest()
        else:
            running[pool.submit(stream.write, piece)] = stream

    while True:
        while len(running) < _THREADS and (stream := next(streams, None)) is not None:
            proceed(stream)
        if not running:
            return digests
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            stream = running.pop(future)
            future.result()
            proceed(stream)


def _check_finite(entry: Entry, piece: memoryview) -> None:
    if entry.is_integer:
        return
    for extreme in torch.aminmax(
        torch.frombuffer(piece, dtype=DTYPES[entry.dtype])
    ):  # both are NaN where any value is
        if not extreme.isfinite():
            raise ConversionError(
                f"tensor {entry.name!r} holds {extreme.item()}: repair the checkpoint or take another"
            )


def _write_at(descriptor: int, piece: memoryview, start: int) -> None:
    while piece:
        count = os.pwrite(descriptor, piece, start)
        piece, start = piece[count:], start + count


def digest_of(chunks: Iterable[memoryview]) -> str:
    """The digest of a tensor's bytes, as `write_shard` gives it."""
    total = 0
    for chunk in chunks:
        total = zlib.crc32(chunk, total)
    return _digest(total)


def _digest(total: int) -> str:
    return f"{total:08x}"


def is_intact(path: Path, entries: Sequence[Entry], digests: Mapping[str, str]) -> bool:
    """Whether a file is, byte for byte, what `write_shard` made of these tensors when it gave these digests."""
    header = shard_header(entries)
    with opened(path) as (descriptor, status):
        if status.st_size != shard_size(entries) or read_at(descriptor, path, 0, len(header)) != header:
            return False
    buffers, start = Buffers(), len(header)
    for entry in file_order(entries):
        if digests.get(entry.name) != digest_of(chunks_at(path, start, entry.size, buffers)):
            return False
        start += entry.size
    return True


def tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, row by row, in pieces of a few megabytes that share its memory."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(raw), CHUNK):
        yield raw[start : start + CHUNK]


def rounded(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor in the dtype it is stored in; `ConversionError` where that has no numbers so large."""
    result = tensor.to(DTYPES[entry.dtype])
    if tensor.isfinite().all() and not result.isfinite().all():
        raise ConversionError(f"tensor {entry.name} is too large for {DTYPES[entry.dtype]}: use --dtype bfloat16")
    return result


def write_index(folder: Path, shards: Mapping[str, Sequence[Entry]]) -> None:
    """Write the index of a checkpoint in several files, as transformers writes it."""
    files = {entry.name: file for file, entries in shards.items() for entry in entries}
    entries = [entry for group in shards.values() for entry in group]
    totals = {
        "total_parameters": sum(prod(entry.shape) for entry in entries),
        "total_size": sum(entry.size for entry in entries),
    }
    content = {"metadata": totals, "weight_map": files}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


TENSOR_ROOM = 128
"""Maximum bytes of a tensor's dtype, shape and offsets in the header."""
METADATA_ROOM = 1024


def write_growing(path: Path, expected: Shapes, groups: Iterable[Tensors], metadata: Mapping[str, str]) -> None:
    """Write groups of tensors one after the other, without holding them all; `expected` names all tensors.

    The header stands first and is known last: room is left for it and filled with spaces, as the format allows. Every
    tensor takes a multiple of eight bytes.
    """
    room = sum(len(name) + TENSOR_ROOM for name in expected) + METADATA_ROOM
    room += -room % LENGTH_BYTES
    header: dict[str, object] = {}
    end = 0
    with path.open("wb") as file:
        file.seek(LENGTH_BYTES + room)
        for tensors in groups:
            for name, tensor in tensors.items():
                begin, end = end, end + tensor.nbytes
                header[name] = {
                    "dtype": DTYPE_NAMES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [begin, end],
                }
                for chunk in tensor_chunks(tensor):
                    file.write(chunk)
        header[METADATA] = dict(metadata)
        file.seek(0)
        file.write(room.to_bytes(LENGTH_BYTES, "little") + json.dumps(header).encode().ljust(room))
