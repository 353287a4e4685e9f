"""Tokenise documents to disk: one file with all tokens, and one with the end offsets of the documents."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from crosshead.common.errors import RecipeError
from crosshead.common.plain_text import start_tokens

from ..schema.sections import DataSource
from .readers import Document

PIECE = 1 << 18
"""Maximum number of characters of a piece. A longer document is cut, if possible after a line; there, tokens may
differ from those of the whole document."""
BATCH = 1 << 21
"""Approximate number of characters that are tokenised in one call."""
BEGINNING = 60
"""Number of characters of a document that an error message quotes."""
TRAINING, HELD_OUT = "training", "held_out"
PARTS = (TRAINING, HELD_OUT)

Tokens = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class PartRecord:
    """Size and digest of one part of a cache (training or held-out)."""

    documents: int
    tokens: int
    """Number of tokens, separators included."""
    digest: str
    """Digest of the tokens and of the end offsets of the documents."""


@dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenised on its own; `first` and `last` mark its position in the document."""

    text: str
    first: bool
    last: bool


def pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """Cut all documents into pieces, independently of the blocks in which they were read; skip blank documents."""
    for document in documents:
        pending, first = "", True
        for text in document:
            for start in range(0, len(text), PIECE):
                pending += text[start : start + PIECE]
                while len(pending) > PIECE:
                    stop = pending.rfind("\n", 0, PIECE) + 1 or PIECE
                    yield Piece(pending[:stop], first, last=False)
                    pending, first = pending[stop:], False
        if pending.strip() or not first:
            yield Piece(pending, first, last=True)


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches of about `BATCH` characters."""
    batch: list[Piece] = []
    size = 0
    for piece in stream:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class TokenEncoder:
    """A copy of a tokenizer that checks each token id against the model's vocabulary size."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        separator = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if separator is None:
            raise RecipeError(
                "the tokenizer has no eos_token or sep_token, which separate documents: set one in its folder"
            )
        self.tokenizer = tokenizer
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content |= {"truncation": None, "padding": None}  # reset the settings of the tokenizer's last call
        self._text, self._vocabulary = json.dumps(content), vocabulary
        self._tokenizer = Tokenizer.from_str(self._text)
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.separator = self._checked([separator])
        has_start = start_tokens(tokenizer)[:1] == [tokenizer.bos_token_id]
        self.start = self._checked([tokenizer.bos_token_id] if has_start else [])

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the tokens of a text, in JSON types."""
        parts = [self._text, self.tokenizer.chat_template]
        if self.tokenizer.chat_template:
            parts.append(self.tokenizer.special_tokens_map)  # a chat template may use special tokens
        digest = blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        content = {"tokenizer": digest, "separator": int(self.separator[0]), "vocabulary": self._vocabulary}
        return content | ({"start": self.start.tolist()} if len(self.start) else {})

    def encode(self, texts: list[str]) -> list[Tokens]:
        """Return the token ids of each text, without special tokens at its beginning or end."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # no offsets: twice as fast
        return [self._checked(encoding.ids) for encoding in encoded]

    def _checked(self, tokens: list[int]) -> Tokens:
        check_vocabulary(tokens, self._vocabulary)
        return np.array(tokens, dtype=self.dtype)


def check_vocabulary(tokens: list[int], vocabulary: int) -> None:
    """Raise `RecipeError` if a token id is not in the model's vocabulary."""
    if max(tokens, default=0) >= vocabulary:
        raise RecipeError(
            f"the tokenizer has the token {max(tokens)}, but the model's vocabulary ends at {vocabulary - 1}: use "
            "the tokenizer of the model"
        )


class PartWriter:
    """Writes the files of one part of a cache (training or held-out)."""

    def __init__(self, folder: Path, name: str, separator: Tokens, stack: ExitStack) -> None:
        self._tokens = stack.enter_context((folder / f"{name}.tokens").open("wb"))
        self._ends = stack.enter_context((folder / f"{name}.ends").open("wb"))
        self._separator, self._digest, self._last = separator, blake2b(digest_size=16), separator[:0]
        self.tokens = self.documents = 0

    def write(self, tokens: Tokens) -> None:
        """Append tokens to the current document."""
        raw = tokens.tobytes()
        self._tokens.write(raw)
        self._digest.update(raw)
        self.tokens += len(tokens)
        self._last = tokens[-1:]

    def ends_with_separator(self) -> bool:
        """True if the last written token is the separator, as at the end of many conversations."""
        return np.array_equal(self._last, self._separator)

    def end_document(self) -> None:
        """Append the separator unless the document ends with it, and record the end offset."""
        if not self.ends_with_separator():
            self.write(self._separator)
        end = np.int64(self.tokens).tobytes()
        self._ends.write(end)
        self._digest.update(end)
        self.documents += 1

    def record(self) -> PartRecord:
        """Return the size and digest of the part."""
        return PartRecord(self.documents, self.tokens, self._digest.hexdigest())


def write_tokens(
    documents: Iterable[Document],
    source: DataSource,
    encoder: TokenEncoder,
    held_out: float,
    folder: Path,
    report: Callable[[], None],
) -> dict[str, PartRecord]:
    """Tokenise documents, and write both parts of a cache into a folder; call `report` after each batch.

    Reading stops after the document that reaches `source.max_tokens`. A single document with more tokens than that
    raises `RecipeError`.
    """
    limit = source.max_tokens
    with ExitStack() as stack:
        parts = {name: PartWriter(folder, name, encoder.separator, stack) for name in PARTS}
        for piece, tokens in _encoded(documents, encoder, report):
            if piece.first:
                part = parts[HELD_OUT if is_held_out(piece.text, held_out) else TRAINING]
                beginning, before = piece.text, part.tokens
                if len(encoder.start) and not np.array_equal(tokens[:1], encoder.start):  # a chat template may add it
                    part.write(encoder.start)
            part.write(tokens)
            if limit is not None and part.tokens + (not part.ends_with_separator()) - before > limit:
                quote = " ".join(beginning[:BEGINNING].split())
                raise RecipeError(
                    f"{source.path}: the document that begins {quote!r} is longer than max_tokens={limit}, and "
                    "documents are never cut: raise it, or divide the document"
                )
            if piece.last:
                part.end_document()
                if limit is not None and sum(writer.tokens for writer in parts.values()) >= limit:
                    break
    return {name: part.record() for name, part in parts.items()}


def _encoded(
    documents: Iterable[Document], encoder: TokenEncoder, report: Callable[[], None]
) -> Iterator[tuple[Piece, Tokens]]:
    for batch in batches(pieces(documents)):
        yield from zip(batch, encoder.encode([piece.text for piece in batch]), strict=True)
        report()


def is_held_out(beginning: str, share: float) -> bool:
    """Whether a document is used for evaluation; depends only on its first piece, so that copies stay together."""
    return int.from_bytes(blake2b(beginning.encode(), digest_size=8).digest(), "big") < share * 2**64
