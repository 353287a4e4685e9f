"""A safetensors file that takes tensors as they come, so that none of them waits in memory for the last.

The header stands first and is known last: room is left for it, and spaces fill what it does not take, as the format
allows.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..architectures.families import Shapes
from ..compress.layer_rewrites import Tensors
from ..sources.safetensors_header import LENGTH_BYTES, METADATA
from ..sources.tensor_store import DTYPE_NAMES
from .shard_writer import tensor_chunks

NUMBERS = 128
"""Bytes of the header that a tensor takes beside its name, at most: dtype, shape, offsets."""
BESIDE = 1024
"""Bytes of the header for all else, at most."""


def write_growing(
    path: Path, expected: Shapes, groups: Iterable[Tensors], metadata: Callable[[], Mapping[str, str]]
) -> None:
    """Write each group of tensors when it comes. `expected` names all; every tensor takes whole eights of bytes.

    `metadata` is asked for when all have come.
    """
    room = sum(len(name) + NUMBERS for name in expected) + BESIDE
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
        header[METADATA] = dict(metadata())
        file.seek(0)
        file.write(room.to_bytes(LENGTH_BYTES, "little") + json.dumps(header).encode().ljust(room))
