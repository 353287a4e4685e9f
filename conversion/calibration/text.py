"""Text for calibration and verification: a file, or the default text with sequences sampled from the model."""

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

from ..architectures.attention_names import decodes
from ..architectures.families import FAMILIES, family_of
from ..options import CALIBRATION_SUFFIX, is_dataset
from ..sources.model_folder import file_digest
from ..sources.resolve import Source
from .documents import has_documents, read_documents
from .head_statistics import fast_dtype
from .streamed_model import StreamedModel

WINDOW_LENGTH = 1024
"""Number of tokens per window for decoders."""
WINDOWS = 16
"""Number of windows of a given text for decoders."""
SENTENCES, SENTENCE_LENGTH = 1024, 32
"""Number and length of windows for encoders, which read single sentences or short paragraphs."""
PAIRS, PAIR_LENGTH = 128, 256
"""Number and length of windows for encoder-decoders: each stack reads half of a window."""
DEFAULT_WINDOWS, SAMPLED_SHAPE = 30, (112, WINDOW_LENGTH // 8)
"""For decoders without a given text: the number of windows, and the number and length of sequences that are sampled
from the model; these make up 14 of the windows."""
DOCUMENTATION = 0.25
"""Fraction of a decoder's windows of default text that are documentation."""
MAX_SAMPLED_PARAMETERS = 4 * 10**9
"""Maximum number of parameters of a model to sample from; for larger models, sampling would take longer than the rest
of the calibration. The amount of text depends on the model only, not on the available memory."""
HELD_OUT = 0.8
"""Fraction of the default text that calibration reads; verification reads the rest."""
DEFAULT_NAME = "crosshead's default text"
"""Name of the default text in conversion.json."""
MIN_WINDOW = 32
"""Minimum number of tokens in a text: a shorter context says little about a model."""
CHARACTERS_PER_TOKEN = 32
"""More characters per token than any tokenizer has on average; limits the part of a long text that is tokenised."""
SEED = 0


def default_text() -> str:
    """Return articles, stories, news, conversations and code, written for this purpose; a tenth is not in English."""
    return files(__package__).joinpath("default_text.txt").read_text(encoding="utf-8")


def default_documentation() -> str:
    """Return manuals and references of invented software.

    A model can predict most of their names only by copying from the context. With prose alone, a budget search would
    remove the heads that copy (induction heads).
    """
    return files(__package__).joinpath("default_documentation.txt").read_text(encoding="utf-8")


def held_out_text() -> str:
    """Return the part of the default text that calibration does not read."""
    text = default_text()
    return text[int(len(text) * HELD_OUT) :]


def windows(tokenizer: Any, text: str, length: int, count: int, vocabulary: int, closed: bool = False) -> torch.Tensor:
    """Return token ids (count, length) of disjoint windows, evenly spaced over the text; fewer for a short text.

    Each window begins with the tokenizer's start tokens, as in the model's training, and ends with its end tokens if
    it is `closed`. A text that is too short for one window gives one shorter window.
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
    """Return `count` evenly spaced pieces of `size` characters, joined; the whole text if it is shorter."""
    if len(text) <= size * count:
        return text
    starts = [index * len(text) // count for index in range(count)]
    return "".join(text[start : start + size] for start in starts)


def within_context(config: Any, count: int, length: int) -> tuple[int, int]:
    """Return number and length of windows within the model's context, with as many tokens. A T5 has no maximum."""
    shorter = min(length, getattr(config, "max_position_embeddings", None) or length)
    return count * length // shorter, shorter


def load_tokenizer(source: Source) -> Any:
    """Return the source's tokenizer, loaded without remote code."""
    folder = source.files[0].parent
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged tokenizer files raise many types of errors
        reason = one_line(error)
        if not (folder / "tokenizer.json").exists() and find_spec("sentencepiece") is None:
            reason = "it is a SentencePiece model: pip install sentencepiece protobuf"
        raise ConversionError(f"the tokenizer in {folder.name} cannot be loaded: {reason}") from None


def parameters(source: Source) -> int:
    """Return the number of parameters of a checkpoint."""
    return sum(prod(entry.shape) for entry in source.store.entries.values())


@dataclass(frozen=True)
class Text:
    """The input of calibration: a text file, documents, a saved calibration, or the default text."""

    path: Path | None
    """Value of --calibration, also `datasets:NAME`; None for the default text."""
    is_sampled: bool = False
    """True if sequences sampled from the model are added to the default text."""
    documents: str | None = None
    """The documents of JSON lines or of a dataset, as one text."""
    of_encoder: bool = False
    """True if the source has an encoder: the default text then has no documentation."""

    @classmethod
    def of(cls, path: Path | None, source: Source) -> "Text":
        """Return the input for a --calibration value; without one, the default text."""
        if path is not None and has_documents(path):
            return cls(path, documents=read_documents(path, load_tokenizer(source)))
        of_encoder = FAMILIES[source.config["model_type"]].is_encoder
        is_sampled = path is None and not of_encoder and parameters(source) <= MAX_SAMPLED_PARAMETERS
        return cls(path, is_sampled, of_encoder=of_encoder)

    @property
    def is_saved(self) -> bool:
        """True if the input is a saved calibration."""
        return self.path is not None and self.path.suffix.lower() == CALIBRATION_SUFFIX

    def described(self) -> dict[str, str | bool]:
        """Return name and digest of the input, for conversion.json."""
        if self.path is None:
            name = DEFAULT_NAME + (", and sequences sampled from the model" if self.is_sampled else "")
            return {**self.of_windows(), "text": name, "default": True}
        if self.documents is not None:
            return dict(self.of_windows())
        try:
            return {"saved" if self.is_saved else "text": self.path.name, "sha256": file_digest(self.path)}
        except OSError as error:
            raise ConversionError(f"--calibration {self.path} cannot be read: {error.strerror}") from None

    def windows(
        self,
        source: Source,
        length: int,
        count: int,
        vocabulary: int,
        closed: bool = False,
        documentation: float = DOCUMENTATION,
    ) -> torch.Tensor:
        """Return windows of tokens (count, length) of the given text, or else of the default text.

        `documentation` is the fraction of a decoder's default windows that are documentation.
        """
        texts = self._texts()
        documentation_count = int(documentation * count) if len(texts) > 1 else 0
        shares = zip(texts, (count - documentation_count, documentation_count), strict=False)
        tokenizer = load_tokenizer(source)
        return torch.cat(
            [windows(tokenizer, text, length, share, vocabulary, closed) for text, share in shares if share]
        )

    def of_windows(self) -> dict[str, str]:
        """Return name and digest of the text that `windows` reads: for a saved calibration, the default text."""
        name = DEFAULT_NAME if self.path is None or self.is_saved else self.path.name
        if self.path is not None and is_dataset(self.path):
            name = str(self.path)
        return {"text": name, "sha256": sha256("".join(self._texts()).encode()).hexdigest()}

    def _texts(self) -> list[str]:
        if self.documents is not None:
            return [self.documents]
        if self.path is not None and not self.is_saved:
            return [read_text(self.path, ConversionError)]
        prose = default_text()
        prose = prose[: int(len(prose) * HELD_OUT)]
        return [prose] if self.of_encoder else [prose, default_documentation()]

    def tokens(self, source: Source, model: StreamedModel, folder: Path, progress: Progress) -> torch.Tensor:
        """Return windows of tokens (B, T) to calibrate on; reuses those that an earlier run saved in the folder."""
        cached = folder / "tokens.safetensors"
        if not cached.exists():
            partial_file = cached.with_name(f"{cached.name}.partial")
            tokens = self.calibration_batch(source, model, progress).contiguous()
            partial_file.write_bytes(save({"tokens": tokens}))  # its errors name the file if the disk is full
            partial_file.replace(cached)
        return load_file(cached)["tokens"]

    def calibration_batch(self, source: Source, model: StreamedModel, progress: Progress) -> torch.Tensor:
        """Return windows of the given text, or else of the default text and of sequences sampled from the model.

        The default text is coherent; sampled sequences are less so, but resemble the model's training data.
        """
        vocabulary = model.config.vocab_size
        is_encoder = not decodes(model.config)
        count, length = WINDOWS if self.path is not None else DEFAULT_WINDOWS, WINDOW_LENGTH
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
    """Return token ids (B, T) of sequences that are sampled from the model.

    Each sequence begins with the tokens `start` and a random token below `known`, the number of tokens that the
    tokenizer has. `resident` loads the whole model into memory, which is faster and gives the same tokens.
    """
    count, length = shape
    generator = torch.Generator().manual_seed(SEED)
    first = torch.randint(known, (count, 1), generator=generator)
    tokens = torch.cat([torch.tensor(start, dtype=torch.long).expand(count, -1), first], dim=1)
    cache = DynamicCache(config=model.config)
    cached = 0
    with model.whole(resident) as module:
        while tokens.shape[1] < length:
            new_tokens = tokens[:, cached:].to(model.device)
            logits = module(new_tokens, **{CACHE: cache}, use_cache=True).logits[:, -1, :known].cpu()
            cached = tokens.shape[1]
            tokens = torch.cat([tokens, _sample(logits, torch.rand(count, 1, generator=generator))], dim=1)
            advance(cached + 1, length)
    return tokens


def _sample(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return a token (B, 1) for each row of logits (B, known), by inverse transform sampling of `uniform` (B, 1)."""
    cumulative = logits.float().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_max(logits.shape[-1] - 1)
