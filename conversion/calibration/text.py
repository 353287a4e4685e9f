"""Sample text for calibration and comparison: a file, or the default text with sequences sampled from the model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import takewhile
from math import prod
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from crosshead.common.errors import ConversionError, one_line
from crosshead.common.free_memory import fits_in_memory
from crosshead.common.progress import Progress

from ..options import CALIBRATION_SUFFIX
from ..sources.model_folder import file_digest
from ..sources.resolve import Source
from .head_statistics import fast_dtype
from .streamed_model import StreamedModel

WINDOW_LENGTH = 1024
WINDOWS = 16
PROSE, REPLACED, WRITTEN = 12, 0.3, (128, WINDOW_LENGTH // 8)
"""Without a text: windows of the default text, the part of their tokens that is replaced by random ones, and sequences
that the model writes."""
LARGEST_SAMPLED = 4 * 10**9
"""A model with more parameters writes nothing: it would take longer than all else. The amount of text depends on the
model alone, never on the memory."""
HELD_OUT = 0.8
"""The part of the default text that calibration reads; verification reads the rest."""
DEFAULT_NAME = "pydoc_data.topics, Python's own help texts"


SHORTEST_WINDOW = 32
"""Tokens: less context than this says little about a model."""
CHARACTERS_PER_TOKEN = 32
"""More than any tokenizer needs on average: how much of a long text is tokenised at all."""


def default_text() -> str:
    """The prose that every CPython carries: the texts of `help()` on the language."""
    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """The content of a text file; `ConversionError` where it is none."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConversionError(f"the text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is no UTF-8 text (byte {error.start} is not): give plain text") from error
    if "\0" in text:
        raise ConversionError(f"{path} is a binary file (it holds zero bytes): give plain text")
    if not text.strip():
        raise ConversionError(f"the text {path} is empty")
    return text


def start_tokens(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before any text: BOS for Llama, none for Qwen."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], pairs)]


def windows(tokenizer: Any, text: str, length: int, count: int, vocabulary: int) -> torch.Tensor:
    """Token ids (count, length) of windows that do not overlap, spread evenly over the text; fewer where it is short.

    Each begins with the tokenizer's start tokens, because the model was trained on sequences that do. A text too short
    for one window is one shorter window. `vocabulary` is how many tokens the model knows.
    """
    excerpt = _excerpts(text, length * CHARACTERS_PER_TOKEN, count)
    tokens = torch.tensor(tokenizer(excerpt, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    if len(tokens) < min(length, SHORTEST_WINDOW):
        raise ConversionError(
            f"the text has {len(tokens)} tokens, too few to run a model on: give at least {SHORTEST_WINDOW}"
        )
    start = torch.tensor(start_tokens(tokenizer), dtype=torch.long)[: length - 1]
    largest = int(torch.cat([start, tokens]).max())
    if largest >= vocabulary:
        raise ConversionError(
            f"the tokenizer gives the token {largest}, but the model's vocabulary ends at {vocabulary - 1}: "
            "they do not belong together"
        )
    room = length - len(start)
    whole = tokens[: max(1, len(tokens) // room) * room].view(-1, min(room, len(tokens)))
    chosen = min(count, len(whole))
    picked = whole[torch.arange(chosen) * len(whole) // chosen]
    return torch.cat([start.expand(chosen, -1), picked], dim=1)


def _excerpts(text: str, size: int, count: int) -> str:
    """The text, or as many pieces of it as asked for where they are less."""
    if len(text) <= size * count:
        return text
    starts = [index * len(text) // count for index in range(count)]
    return "".join(text[start : start + size] for start in starts)


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
    """Beside the default text, the model writes some itself: it is no larger than `LARGEST_SAMPLED`."""

    @classmethod
    def of(cls, given: Path | None, source: Source) -> "Text":
        """What is given, or what there is without it."""
        return cls(given, given is None and parameters(source) <= LARGEST_SAMPLED)

    @property
    def is_saved(self) -> bool:
        """It is no text, but what was observed on some."""
        return self.given is not None and self.given.suffix == CALIBRATION_SUFFIX

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


SEED = 0


class _Reserved(DynamicLayer):
    """The cache of one layer in room for the whole sequence: the library's own is copied at every token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._room = length, torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values (B, h, T, d); returns all there are."""
        if not self.is_initialized:
            batch, heads, _, size = key_states.shape
            self._room = key_states.new_empty(2, batch, heads, self._length, size)
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = self._room[:, :, :, :end]
        return self.keys, self.values


@torch.no_grad()
def sampled_text(
    model: StreamedModel,
    shape: tuple[int, int],
    start: list[int],
    known: int,
    advance: Callable[[int, int], None],
    resident: bool = True,
) -> torch.Tensor:
    """Token ids of sequences (B, T), sampled from the model as it is.

    Each begins with the tokens of `start` and a random one of `known` tokens. Whether the model is `resident` in
    memory decides on the time alone.
    """
    count, length = shape
    generator = torch.Generator().manual_seed(SEED)
    first = torch.randint(known, (count, 1), generator=generator)
    tokens = torch.cat([torch.tensor(start, dtype=torch.long).expand(count, -1), first], dim=1)
    cache = Cache(layers=[_Reserved(length) for _ in range(model.config.num_hidden_layers)])
    cached = 0
    with model.whole(resident) as whole:
        while tokens.shape[1] < length:
            logits = whole(tokens[:, cached:], past_key_values=cache, use_cache=True).logits[:, -1, :known]
            cached = tokens.shape[1]
            tokens = torch.cat([tokens, drawn(logits, torch.rand(count, 1, generator=generator))], dim=1)
            advance(cached + 1, length)
    return tokens


def drawn(logits: torch.Tensor, luck: torch.Tensor) -> torch.Tensor:
    """One token for each row of logits (B, known), by a number in [0, 1) each (B, 1)."""
    reached = logits.float().softmax(-1).cumsum(-1)
    return torch.searchsorted(reached, luck * reached[:, -1:], right=True).clamp_max(logits.shape[-1] - 1)
