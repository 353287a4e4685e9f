"""The text that a conversion runs the source on, and what it keeps of that."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .calibration import WINDOW_LENGTH, Calibration, Observers, calibrate
from .errors import ConversionError, one_line
from .job import Progress
from .published_folder import file_digest
from .sources import Source
from .streamed_model import StreamedModel
from .text import default_text, read_text, windows

SUFFIX = ".safetensors"
WINDOWS, DEFAULT_WINDOWS, RANDOM_WINDOWS = 16, 12, 8
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
        raise ConversionError(f"the tokenizer in {folder.name} cannot be loaded: {one_line(error)}") from None


@dataclass(frozen=True)
class Text:
    """What a conversion runs the source on: a file of text, a saved calibration, or the default text."""

    given: Path | None

    @property
    def is_saved(self) -> bool:
        """It is no text, but what was observed on some."""
        return self.given is not None and self.given.suffix == SUFFIX

    def described(self) -> dict[str, str]:
        """For the record: name and digest."""
        if self.given is None:
            return {"text": f"{DEFAULT_NAME}; and {RANDOM_WINDOWS} windows of random tokens"}
        try:
            return {"saved" if self.is_saved else "text": self.given.name, "sha256": file_digest(self.given)}
        except OSError as error:
            raise ConversionError(f"--calibration {self.given} cannot be read: {error.strerror}") from None

    def windows(self, source: Source, length: int, count: int, vocabulary: int) -> torch.Tensor:
        """Windows of tokens (count, length); of the default text where there is none."""
        if self.given is None or self.is_saved:
            prose = default_text()
            prose = prose[: int(len(prose) * HELD_OUT)]
        else:
            prose = read_text(self.given)
        return windows(load_tokenizer(source), prose, length, count, vocabulary)

    def to_calibrate_on(self, source: Source, vocabulary: int) -> torch.Tensor:
        """Windows of the text; of the default text fewer, and some of random tokens instead.

        The default text is all of one kind. What is fitted to it alone is fitted less well to other text.
        """
        if self.given is not None:
            return self.windows(source, WINDOW_LENGTH, WINDOWS, vocabulary)
        prose = self.windows(source, WINDOW_LENGTH, DEFAULT_WINDOWS, vocabulary)
        generator = torch.Generator().manual_seed(0)
        known = min(len(load_tokenizer(source)), vocabulary)
        return torch.cat([prose, torch.randint(known, (RANDOM_WINDOWS, prose.shape[1]), generator=generator)])


def observe(
    source: Source, stock: Any, text: Text, observers: Observers, kept: Path, progress: Progress
) -> Calibration:
    """The saved calibration, or the one that a run before this has kept, or a new one."""
    if text.given is not None and text.is_saved:
        calibration = Calibration(text.given)
        calibration.check(observers)
        return calibration
    if not kept.exists():
        tokens = text.to_calibrate_on(source, stock.vocab_size)
        model = StreamedModel(source.store, stock)
        calibrate(model, tokens, observers, kept, lambda *done: progress("calibrating", *done))
    return Calibration(kept)
