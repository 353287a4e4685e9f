"""Digests of files, and the fingerprint of a model directory, which changes with its config.json or weights."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import EvalError

CONFIG, WEIGHTS = "config.json", "*.safetensors"
SAMPLE = 4096
"""Bytes read from each tensor. Training changes them as well, and reading all bytes would take minutes."""


def files_digest(files: Iterable[Path]) -> str:
    """The sha256 of the sha256 digests of the files, in the given order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def model_fingerprint(folder: Path, with_config: bool = True) -> str:
    """The sha256 of config.json and of the name, size, header and first bytes per tensor of each safetensors file.

    Without `with_config`, only of the safetensors files: saving a model again may change its config.json.
    """
    try:
        digest = hashlib.sha256((folder / CONFIG).read_bytes() if with_config else b"")
        for path in sorted(folder.glob(WEIGHTS)):
            for part in _parts(path):
                digest.update(len(part).to_bytes(8, "little") + part)
    except OSError as error:
        raise EvalError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    """The bytes of a safetensors file that go into the fingerprint."""
    size = path.stat().st_size
    yield f"{path.name} {size}".encode()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
        yield header
        for begin, end in _offsets(path, header):
            file.seek(8 + length + begin)
            yield file.read(min(SAMPLE, end - begin))


def _offsets(path: Path, header: bytes) -> list[tuple[int, int]]:
    """First and last (exclusive) byte of each tensor, counted after the header, in the order of the file."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        return sorted((int(begin), int(end)) for begin, end in (entry["data_offsets"] for entry in entries))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise EvalError(f"{path} is damaged: its header cannot be read") from error
