"""Cache of tokenised sources: one memory-mapped folder per source and settings, written atomically.

    <digest>/              named by a fingerprint of the source's files, the tokenizer and the held-out fraction
      training.tokens      all tokens of the training documents, with a separator after each document
      training.ends        the end offset of each training document, after its separator: int64
      held_out.*           the same for the documents to evaluate on
      cache.json           the fingerprint, and the sizes of the files
    <digest>.lock          held by the process that tokenises, while others wait
    .<digest>.*.partial/   files being written, or left by a killed process: the next process removes them

On a file system without locks each process tokenises for itself, and the first to finish publishes its folder.
Files are not synced: after a power failure, a file may be too short, and the folder is then rebuilt.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from crosshead.common.errors import RecipeError, os_errors
from crosshead.common.posix import lock_file
from crosshead.common.progress import Counter, Progress, silent

from ..schema.sections import DataSource
from .readers import documents, source_fingerprint, total_size
from .tokenising import PARTS, PartRecord, TokenEncoder, Tokens, write_tokens

FORMAT = 3
"""Version of the cache format; increment it when unchanged settings produce different files."""
RECORD = "cache.json"
POSITION = np.dtype(np.int64)

logger = logging.getLogger(__name__)


class TokenStream:
    """The concatenated documents of one part of a cache (training or held-out), memory-mapped."""

    def __init__(self, folder: Path, part: str, dtype: np.dtype[Any]) -> None:
        self._arguments = folder, part, dtype
        self.tokens: Tokens = _mapped(folder / f"{part}.tokens", dtype)
        self.ends: Tokens = _mapped(folder / f"{part}.ends", POSITION)
        """End offset of each document in `tokens`, after its separator."""

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[Any, ...]]:
        """Pickle only the path: another process maps the files itself instead of receiving a copy of their content."""
        return TokenStream, self._arguments


@dataclass(frozen=True)
class TokenCache:
    """A tokenised source."""

    folder: Path
    dtype: np.dtype[Any]
    parts: dict[str, PartRecord]

    def stream(self, part: str) -> TokenStream:
        """Return the training or the held-out documents; `part` is one of `PARTS`."""
        return TokenStream(self.folder, part, self.dtype)


def open_cache(
    source: DataSource,
    encoder: TokenEncoder,
    held_out: float,
    root: Path,
    progress: Progress = silent,
) -> TokenCache:
    """Open the cached tokens of a source in the cache folder `root`; tokenise the source first if necessary.

    The progress counts the bytes that were read or, for a Hub dataset, the documents.
    """
    with os_errors(RecipeError, f"{source.path} cannot be read"):
        key = {"format": FORMAT, "source": source_fingerprint(source), "encoder": encoder.fingerprint()}
        key |= {"held_out": held_out}
    folder = root / blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    cached = _complete(folder, encoder)
    if cached is not None:
        return cached
    with os_errors(RecipeError, f"data.cache={root} cannot be written, choose another folder"):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{folder.name}.lock") as is_locked:
            if is_locked:
                for partial in root.glob(f".{folder.name}.*partial"):  # left by a killed process
                    shutil.rmtree(partial)
            return _complete(folder, encoder) or _build(folder, key, source, encoder, held_out, progress)


def _complete(folder: Path, encoder: TokenEncoder) -> TokenCache | None:
    """Return the cache in the folder if its files have the recorded sizes, otherwise None."""
    try:
        content = json.loads((folder / RECORD).read_bytes())
        parts = {name: PartRecord(**content["parts"][name]) for name in PARTS}
        sizes = {f"{name}.tokens": part.tokens * encoder.dtype.itemsize for name, part in parts.items()}
        sizes |= {f"{name}.ends": part.documents * POSITION.itemsize for name, part in parts.items()}
        is_complete = all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError):
        is_complete = False
    if is_complete:
        return TokenCache(folder, encoder.dtype, parts)
    if folder.exists():
        logger.warning("the token cache %s is damaged: it is written again", folder)
    return None


def _build(
    folder: Path, key: dict[str, Any], source: DataSource, encoder: TokenEncoder, held_out: float, progress: Progress
) -> TokenCache:
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}.partial")
    partial.mkdir()
    counter = Counter(progress, source.path, total_size(source))
    try:
        texts = documents(source, encoder.tokenizer, counter.count)
        parts = write_tokens(texts, source, encoder, held_out, partial, counter.show)
        if not any(part.documents for part in parts.values()):
            raise RecipeError(f"the {source.kind} source {source.path} is empty: it has no text")
        content = {"key": key, "parts": {name: asdict(part) for name, part in parts.items()}}
        (partial / RECORD).write_text(json.dumps(content, indent=2), encoding="utf-8")
        if folder.exists():  # damaged, or published by another process on a file system without locks
            if cached := _complete(folder, encoder):
                return cached
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return TokenCache(folder, encoder.dtype, parts)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file until the block or the process ends; yield False on a file system without locks."""
    with path.open("a") as file:
        try:
            is_locked = lock_file(file, path.parent)
        except BlockingIOError:
            logger.warning("another process writes to %s: waiting", path.parent)
            is_locked = lock_file(file, path.parent, wait=True)
        yield is_locked


def _mapped(path: Path, dtype: np.dtype[Any]) -> Tokens:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # an empty file cannot be mapped
