"""The fingerprint of the model that a calibration was made for: its configuration and every weight that was run.

What is observed in a layer depends on the weights of all layers up to it. While a model is calibrated, its tensors are
hashed as they are read; a saved calibration costs one more pass over the checkpoint, before anything is written.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..architectures.families import stock_shapes
from ..plan import HEAD
from ..sources.tensor_store import Entry, TensorStore
from ..writing.shard_writer import digest_of, tensor_chunks

NORM = "model.norm.weight"
NOT_RUN = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Fields of a configuration that no layer computes with."""


class HashedReads:
    """A store of tensors that keeps the checksum of each one read."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self.digests: dict[str, str] = {}

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name."""
        return self._store.entries

    @property
    def shards(self) -> Mapping[str, list[str]]:
        """The files they lie in."""
        return self._store.shards

    @property
    def places(self) -> list[Path]:
        """The folder or the files that must stay as they are."""
        return self._store.places

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype."""
        tensor = self._store.read(name)
        self.digests[name] = digest_of(tensor_chunks(tensor))
        return tensor

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor."""
        return self._store.chunks(name)


def fingerprint(config: Any, entries: Mapping[str, Entry], digests: Mapping[str, str]) -> str:
    """One hash of a stock configuration and of the tensors that have a checksum."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_RUN}
    lines = [json.dumps(fields, sort_keys=True, default=str)]
    lines += [f"{name} {entries[name].dtype} {list(entries[name].shape)} {digests[name]}" for name in sorted(digests)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def fingerprint_of(store: TensorStore, config: Any, advance: Callable[[int, int], None]) -> str:
    """The fingerprint that a calibration of this model would have: reads all that the layers read.

    `advance` is called with the bytes done and the bytes there are.
    """
    run = [name for name in stock_shapes(config) if name not in (NORM, HEAD)]
    total, done = sum(store.entries[name].size for name in run), 0
    digests: dict[str, str] = {}
    for name in run:
        digests[name] = digest_of(store.chunks(name))
        done += store.entries[name].size
        advance(done, total)
    return fingerprint(config, store.entries, digests)
