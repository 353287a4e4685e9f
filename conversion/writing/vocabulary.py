"""A larger vocabulary: rows appended to the embedding and the head, each the mean of those there.

A new token then starts as the average one, and what the old ones predict among themselves stays as it was.
"""

from collections.abc import Iterator

import torch

from crosshead.common.errors import ConversionError

from ..sources.tensor_store import DTYPES, Entry, TensorStore
from .shard_writer import rounded, tensor_chunks

ROWS = 256
"""How many new rows are made at a time."""


def check_vocabulary(asked: int, present: int) -> None:
    """`ConversionError` where the vocabulary would shrink."""
    if asked < present:
        raise ConversionError(f"--vocab-size {asked} is less than the model's {present}: a vocabulary only grows")


def grown(store: TensorStore, entry: Entry) -> Iterator[memoryview]:
    """The bytes of a stored matrix in the dtype of `entry`, then its mean row as often as `entry` has rows more."""
    stored = store.entries[entry.name]
    source, target = DTYPES[stored.dtype], DTYPES[entry.dtype]
    width = entry.shape[1]
    total = torch.zeros(width, dtype=torch.float64)
    partial = b""
    for chunk in store.chunks(entry.name):
        data = partial + bytes(chunk)
        whole = len(data) - len(data) % (width * source.itemsize)
        partial = data[whole:]
        if whole:
            rows = torch.frombuffer(bytearray(data[:whole]), dtype=source).reshape(-1, width)
            total += rows.double().sum(0)
            yield from tensor_chunks(rounded(rows, entry))
    mean = (total / stored.shape[0]).to(target)
    for start in range(stored.shape[0], entry.shape[0], ROWS):
        yield from tensor_chunks(mean.repeat(min(ROWS, entry.shape[0] - start), 1))
