"""A local checkpoint folder as a store of tensors: one safetensors file, or an index and its shards."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from crosshead.common.errors import ConversionError

from .checked_json import read_object, shown
from .file_bytes import Buffers, chunks_at, fill, opened
from .safetensors_header import LONGEST_HEADER, Header, read_header
from .tensor_store import STORED, Entry

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST_NAME = 255


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
