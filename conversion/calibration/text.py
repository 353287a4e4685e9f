"""Text for calibration and comparison: a file, or the default text with sequences sampled from the model."""

from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import AutoTokenizer, DynamicCache

from crosshead.common.errors import ConversionError, one_line
from crosshead.common.free_memory import fits_in_memory
from crosshead.common.plain_text import end_tokens, read_text, start_tokens
from crosshead.common.progress import Advance, Progress
from crosshead.modeling.cache import CACHE

from ..architectures.families import FAMILIES, family_of
from ..architectures.stacks import decodes
from ..options import CALIBRATION_SUFFIX, is_dataset
from ..sources.model_folder import file_digest
from ..sources.resolve import Source
from .documents import has_documents, read_documents
from .head_statistics import fast_dtype
from .streamed_model import StreamedModel

WINDOW_LENGTH = 1024
WINDOWS = 16
SENTENCES, SENTENCE_LENGTH = 1024, 32
"""The number and the length of windows for encoders, which read single sentences or short paragraphs."""
PAIRS, PAIR_LENGTH = 128, 256
"""The same for an encoder with a decoder: each reads half of a window."""
DEFAULT_WINDOWS, SAMPLED_SHAPE = 30, (112, WINDOW_LENGTH // 8)
"""Without a text: the number of windows, and the number and length of sequences that are sampled from the model; these
make up 14 of the windows."""
DOCUMENTATION = 0.25
"""The part of a decoder's windows of default text that are documentation."""
MAX_SAMPLED_PARAMETERS = 4 * 10**9
"""Larger models are not sampled from, because it would take longer than the rest. The amount of text depends on the
model, never on the memory."""
HELD_OUT = 0.8
"""The part of the default text that calibration reads; verification reads the rest."""
DEFAULT_NAME = "crosshead's default text"
MIN_WINDOW = 32
"""Minimum number of tokens: a shorter context says little about a model."""
CHARACTERS_PER_TOKEN = 32
"""More than any tokenizer needs on average; limits the part of a long text that is tokenised."""
SEED = 0


def default_text() -> str:
    """Articles, stories, news, conversations and code, written for this purpose; a tenth is in other languages."""
    return files(__package__).joinpath("default_text.txt").read_text(encoding="utf-8")


def default_documentation() -> str:
    """Manuals and references of invented software.

    A model predicts most of their names by copying. With prose alone, the choice of heads loses the heads that copy.
    """
    return files(__package__).joinpath("default_documentation.txt").read_text(encoding="utf-8")


def held_out_text() -> str:
    """The part of the default text that calibration does not read."""
    text = default_text()
    return text[int(len(text) * HELD_OUT) :]


def windows(tokenizer: Any, text: str, length: int, count: int, vocabulary: int, closed: bool = False) -> torch.Tensor:
    """Token ids (count, length) of windows that do not overlap, evenly spaced over the text; fewer for a short text.

    Each begins with the tokenizer's start tokens, as in the model's training, and ends with its end tokens if it is
    `closed`. A text too short for one window gives one shorter window. `vocabulary` is the size of the
    model's vocabulary.
    """
    excerpt = _excerpts(text, length * CHARACTERS_PER_TOKEN, count)
    tokens = torch.tensor(tokenizer(excerpt, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    if len(tokens) < min(length, MIN_WINDOW):
        raise ConversionError(
            f"the text has {len(tokens)} tokens, too few to run a model on: give at least {MIN_WINDOW}"
        )
    start = torch.tensor(start_tokens(tokenizer), dtype=torch.long)[: length - 1]
    end = torch.tensor(end_tokens(tokenizer) if closed else [], dtype=torch.long)
    largest = int(torch.cat([start, tokens, end]).max())
    if largest >= vocabulary:
        raise ConversionError(
            f"the tokenizer gives the token {largest}, but the model's vocabulary ends at {vocabulary - 1}: "
            "use the model's own tokenizer"
        )
    size = length - len(start) - len(end)
    if size < 1:
        raise ConversionError(
            f"the model reads {length} tokens, which leaves none beside {len(start) + len(end)} special tokens"
        )
    candidates = tokens[: max(1, len(tokens) // size) * size].view(-1, min(size, len(tokens)))
    count = min(count, len(candidates))
    selected = candidates[torch.arange(count) * len(candidates) // count]
    return torch.cat([start.expand(count, -1), selected, end.expand(count, -1)], dim=1)


def _excerpts(text: str, size: int, count: int) -> str:
    """`count` evenly spaced pieces of `size` characters; the whole text if it is shorter than that."""
    if len(text) <= size * count:
        return text
    starts = [index * len(text) // count for index in range(count)]
    return "".join(text[start : start + size] for start in starts)


def within_context(config: Any, count: int, length: int) -> tuple[int, int]:
    """Number and length of windows, cut to the model's context; the number of tokens stays. A T5 has no maximum."""
    shorter = min(length, getattr(config, "max_position_embeddings", None) or length)
    return count * length // shorter, shorter


def load_tokenizer(source: Source) -> Any:
    """The source's tokenizer, loaded without remote code."""
    folder = source.files[0].parent
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged tokenizer files raise many types of errors
        reason = one_line(error)
        if not (folder / "tokenizer.json").exists() and find_spec("sentencepiece") is None:
            reason = "it is a SentencePiece model: pip install sentencepiece protobuf"
        raise ConversionError(f"the tokenizer in {folder.name} cannot be loaded: {reason}") from None


def parameters(source: Source) -> int:
    """The number of parameters of a checkpoint."""
    return sum(prod(entry.shape) for entry in source.store.entries.values())


@dataclass(frozen=True)
class Text:
    """The input of calibration: a text, documents, a saved calibration, or the default text."""

    given: Path | None
    is_sampled: bool = False
    """Whether sequences sampled from the model are added to the default text."""
    documents: str | None = None
    """The documents of JSON lines or of a dataset, as one text."""
    of_encoder: bool = False
    """Whether an encoder reads it: its default text is prose alone."""

    @classmethod
    def of(cls, given: Path | None, source: Source) -> "Text":
        """The given text; without one, the default text."""
        if given is not None and has_documents(given):
            return cls(given, documents=read_documents(given, load_tokenizer(source)))
        of_encoder = FAMILIES[source.config["model_type"]].is_encoder
        is_sampled = given is None and not of_encoder and parameters(source) <= MAX_SAMPLED_PARAMETERS
        return cls(given, is_sampled, of_encoder=of_encoder)

    @property
    def is_saved(self) -> bool:
        """Whether it is a saved calibration."""
        return self.given is not None and self.given.suffix == CALIBRATION_SUFFIX

    def described(self) -> dict[str, str | bool]:
        """Name and digest, for the record."""
        if self.given is None:
            name = DEFAULT_NAME + (", and sequences sampled from the model" if self.is_sampled else "")
            return {**self.of_windows(), "text": name, "default": True}
        if self.documents is not None:
            return dict(self.of_windows())
        try:
            return {"saved" if self.is_saved else "text": self.given.name, "sha256": file_digest(self.given)}
        except OSError as error:
            raise ConversionError(f"--calibration {self.given} cannot be read: {error.strerror}") from None

    def windows(
        self,
        source: Source,
        length: int,
        count: int,
        vocabulary: int,
        closed: bool = False,
        documentation: float = DOCUMENTATION,
    ) -> torch.Tensor:
        """Windows of tokens (count, length) of the given text, or else of the default text.

        `documentation` is the part of a decoder's default windows that are documentation.
        """
        texts = self._texts()
        last = int(documentation * count) if len(texts) > 1 else 0
        parts = [(text, share) for text, share in zip(texts, (count - last, last), strict=False) if share]
        tokenizer = load_tokenizer(source)
        return torch.cat([windows(tokenizer, text, length, share, vocabulary, closed) for text, share in parts])

    def of_windows(self) -> dict[str, str]:
        """Name and digest of the text that `windows` reads; a saved calibration contains no text."""
        name = DEFAULT_NAME if self.given is None or self.is_saved else self.given.name
        if self.given is not None and is_dataset(self.given):
            name = str(self.given)
        return {"text": name, "sha256": sha256("".join(self._texts()).encode()).hexdigest()}

    def _texts(self) -> list[str]:
        if self.documents is not None:
            return [self.documents]
        if self.given is not None and not self.is_saved:
            return [read_text(self.given, ConversionError)]
        prose = default_text()
        prose = prose[: int(len(prose) * HELD_OUT)]
        return [prose] if self.of_encoder else [prose, default_documentation()]

    def tokens(self, source: Source, model: StreamedModel, folder: Path, progress: Progress) -> torch.Tensor:
        """Windows of tokens (B, T) to calibrate on: those that an earlier run left in the folder, or new ones."""
        cached = folder / "tokens.safetensors"
        if not cached.exists():
            partial_file = cached.with_name(f"{cached.name}.partial")
            tokens = self.to_calibrate_on(source, model, progress).contiguous()
            partial_file.write_bytes(save({"tokens": tokens}))  # which names the file if the disk is full
            partial_file.replace(cached)
        return load_file(cached)["tokens"]

    def to_calibrate_on(self, source: Source, model: StreamedModel, progress: Progress) -> torch.Tensor:
        """Windows of the given text, or else of the default text and of sequences sampled from the model.

        The default text is coherent; sampled sequences are less so, but resemble the model's training data.
        """
        vocabulary = model.config.vocab_size
        is_encoder = not decodes(model.config)
        count, length = WINDOWS if self.given is not None else DEFAULT_WINDOWS, WINDOW_LENGTH
        if is_encoder:
            count, length = SENTENCES, SENTENCE_LENGTH
        elif family_of(model.config).is_encoder:
            count, length = PAIRS, PAIR_LENGTH
        count, length = within_context(model.config, count, length)
        if not self.is_sampled:
            return self.windows(source, length, count, vocabulary, is_encoder)
        tokenizer = load_tokenizer(source)
        sampler = StreamedModel(source.store, model.config, fast_dtype(), device=str(model.device))
        resident = fits_in_memory(4 * parameters(source), model.device)
        shape, known = within_context(model.config, *SAMPLED_SHAPE), min(len(tokenizer), vocabulary)
        tokens = sampled_text(sampler, shape, start_tokens(tokenizer), known, partial(progress, "sampling"), resident)
        sampled = tokens.flatten()[: tokens.numel() // length * length].view(-1, length)
        return torch.cat([self.windows(source, length, count - len(sampled), vocabulary), sampled])


@torch.no_grad()
def sampled_text(
    model: StreamedModel, shape: tuple[int, int], start: list[int], known: int, advance: Advance, resident: bool = True
) -> torch.Tensor:
    """Token ids of sequences (B, T) that are sampled from the model.

    Each begins with the tokens `start` and a random one of `known` tokens. `resident` loads the whole model into
    memory, which is faster and gives the same tokens.
    """
    count, length = shape
    generator = torch.Generator().manual_seed(SEED)
    first = torch.randint(known, (count, 1), generator=generator)
    tokens = torch.cat([torch.tensor(start, dtype=torch.long).expand(count, -1), first], dim=1)
    cache = DynamicCache(config=model.config)
    cached = 0
    with model.whole(resident) as whole:
        while tokens.shape[1] < length:
            given = tokens[:, cached:].to(model.device)
            logits = whole(given, **{CACHE: cache}, use_cache=True).logits[:, -1, :known].cpu()
            cached = tokens.shape[1]
            tokens = torch.cat([tokens, _sample(logits, torch.rand(count, 1, generator=generator))], dim=1)
            advance(cached + 1, length)
    return tokens


def _sample(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token for each row of logits (B, known), by inverse transform of numbers in [0, 1) (B, 1)."""
    cumulative = logits.float().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_max(logits.shape[-1] - 1)
