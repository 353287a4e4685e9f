"""Runs the source on the calibration text, and keeps the statistics for a later run."""

from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError, one_line

from ..sources.model_folder import file_digest
from ..sources.resolve import Source
from ..verification.reload import fits_in_memory
from ..writing.writer import Progress
from .calibration import WINDOW_LENGTH, Calibration, Observers, calibrate
from .fingerprint import HashedReads, fingerprint, fingerprint_of
from .head_statistics import fast_dtype
from .sampled_text import sampled_text
from .streamed_model import StreamedModel
from .text import default_text, read_text, start_tokens, windows

SUFFIX = ".safetensors"
WINDOWS = 16
PROSE, REPLACED, WRITTEN = 12, 0.3, (128, WINDOW_LENGTH // 8)
"""Without a text: windows of the default text, the part of their tokens that is replaced by random ones, and sequences
that the model writes."""
LARGEST_WRITER = 4 * 10**9
"""A model with more parameters writes nothing: it would take longer than all else. The amount of text depends on the
model alone, never on the memory."""
HELD_OUT = 0.8
"""The part of the default text that calibration reads; verification reads the rest."""
DEFAULT_NAME = "pydoc_data.topics, Python's own help texts"


def load_tokenizer(source: Source) -> Any:
    """The source's tokenizer; no code of the source runs."""
    from transformers import AutoTokenizer

    folder = source.files[0].parent
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer's files may be broken in many ways
        reason = one_line(error)
        if not (folder / "tokenizer.json").exists() and find_spec("sentencepiece") is None:
            reason = "it is a SentencePiece model: pip install sentencepiece protobuf"
        raise ConversionError(f"the tokenizer in {folder.name} cannot be loaded: {reason}") from None


def parameters(source: Source) -> int:
    """How many numbers the source's tensors hold."""
    return sum(prod(entry.shape) for entry in source.store.entries.values())


@dataclass(frozen=True)
class Text:
    """What a conversion runs the source on: a file of text, a saved calibration, or the default text."""

    given: Path | None
    written: bool = False
    """Beside the default text, the model writes some itself: it is no larger than `LARGEST_WRITER`."""

    @classmethod
    def of(cls, given: Path | None, source: Source) -> "Text":
        """What is given, or what there is without it."""
        return cls(given, given is None and parameters(source) <= LARGEST_WRITER)

    @property
    def is_saved(self) -> bool:
        """It is no text, but what was observed on some."""
        return self.given is not None and self.given.suffix == SUFFIX

    def described(self) -> dict[str, str | bool]:
        """For the record: name and digest."""
        if self.given is None:
            written = ", and what the model writes" if self.written else ""
            name = f"{DEFAULT_NAME}, with random tokens in it{written}"
            return {"text": name, "default": True, "sha256": self.digest_read()}
        try:
            return {"saved" if self.is_saved else "text": self.given.name, "sha256": file_digest(self.given)}
        except OSError as error:
            raise ConversionError(f"--calibration {self.given} cannot be read: {error.strerror}") from None

    @property
    def read_as(self) -> str:
        """What `windows` reads, by name: a saved calibration has no text in it."""
        return DEFAULT_NAME if self.given is None or self.is_saved else self.given.name

    def windows(self, source: Source, length: int, count: int, vocabulary: int) -> torch.Tensor:
        """Windows of tokens (count, length); of the default text where there is none."""
        return windows(load_tokenizer(source), self._prose(), length, count, vocabulary)

    def digest_read(self) -> str:
        """The SHA-256 of what `windows` reads."""
        return sha256(self._prose().encode()).hexdigest()

    def _prose(self) -> str:
        if self.given is not None and not self.is_saved:
            return read_text(self.given)
        prose = default_text()
        return prose[: int(len(prose) * HELD_OUT)]

    def to_calibrate_on(self, source: Source, model: StreamedModel, progress: Progress) -> torch.Tensor:
        """Windows of the text; beside those of the default text, others.

        The default text is all of one kind, and what is fitted to it alone is fitted less well to other text. Random
        tokens in it bring the rest of the vocabulary, and what the model writes is of the kind that it knows.
        """
        vocabulary = model.config.vocab_size
        if self.given is not None:
            return self.windows(source, WINDOW_LENGTH, WINDOWS, vocabulary)
        prose = self.windows(source, WINDOW_LENGTH, PROSE, vocabulary)
        tokenizer = load_tokenizer(source)
        known, start = min(len(tokenizer), vocabulary), start_tokens(tokenizer)
        generator = torch.Generator().manual_seed(0)
        is_replaced = torch.rand(prose.shape, generator=generator) < REPLACED
        is_replaced[:, : len(start)] = False
        found = [torch.where(is_replaced, torch.randint(known, prose.shape, generator=generator), prose)]
        if self.written:
            writer = StreamedModel(source.store, model.config, fast_dtype())
            resident = fits_in_memory(4 * parameters(source))
            advance = partial(progress, "sampling")
            written = sampled_text(writer, WRITTEN, start, known, advance, resident).flatten()
            found.append(written[: len(written) // prose.shape[1] * prose.shape[1]].view(-1, prose.shape[1]))
        return torch.cat(found)


def observe(
    source: Source, stock: Any, text: Text, observers: Observers, kept: Path, progress: Progress
) -> Calibration:
    """The saved calibration, or the one that a run before this has kept, or a new one."""
    if text.given is not None and text.is_saved:
        calibration = Calibration(text.given)
        calibration.check(observers, lambda: fingerprint_of(source.store, stock, partial(progress, "checking")))
        return calibration
    if not kept.exists():
        hashed = HashedReads(source.store)
        model = StreamedModel(hashed, stock)
        tokens = text.to_calibrate_on(source, model, progress)
        calibrate(
            model,
            tokens,
            observers,
            kept,
            partial(progress, "calibrating"),
            lambda: fingerprint(stock, hashed.entries, hashed.digests),
        )
    return Calibration(kept)
