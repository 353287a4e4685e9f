"""Tokenises documents to disk: one file of all tokens, and one of document boundaries."""

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

from .readers import Document

PIECE = 1 << 18
"""Characters: a longer document is tokenised in pieces, cut after a line, at the cost of a token or so at each cut."""
BATCH = 1 << 21
"""Characters that are tokenised at a time."""
BEGINNING = 60
"""Characters by which a document is named."""
TRAINING, HELD_OUT = "training", "held_out"
PARTS = (TRAINING, HELD_OUT)

Tokens = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class PartRecord:
    """What one part of a cache holds."""

    documents: int
    tokens: int
    """Separators included."""
    digest: str
    """Of the tokens and of where documents end."""


@dataclass(frozen=True)
class Piece:
    """A part of a document."""

    text: str
    first: bool
    last: bool

    @property
    def is_blank_document(self) -> bool:
        """It is a whole document, without anything to learn from."""
        return self.first and self.last and not self.text.strip()


def pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """All documents, cut into pieces."""
    for document in documents:
        held, first = "", True
        for text in _cut(document):
            if held:
                yield Piece(held, first, last=False)
                first = False
            held = text
        yield Piece(held, first, last=True)


def _cut(document: Document) -> Iterator[str]:
    """Pieces that do not depend on how the document was read."""
    held = ""
    for text in document:
        for start in range(0, len(text), PIECE):
            held += text[start : start + PIECE]
            while len(held) > PIECE:
                stop = held.rfind("\n", 0, PIECE) + 1 or PIECE
                yield held[:stop]
                held = held[stop:]
    if held:
        yield held


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups of about `BATCH` characters, documents without text left out."""
    batch: list[Piece] = []
    size = 0
    for piece in stream:
        if piece.is_blank_document:
            continue
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class LongDocumentError(RecipeError):
    """One document alone is longer than all that may be read; `str` says which, but not of which source."""

    def __init__(self, beginning: str, limit: int) -> None:
        words = " ".join(beginning[:BEGINNING].split())
        super().__init__(
            f"the document that begins {words!r} is longer than max_tokens={limit}, and none is cut: give more, or "
            "divide it"
        )


class TokenEncoder:
    """A copy of a tokenizer, checked against the model that it is used for."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        if tokenizer.eos_token_id is None:
            raise RecipeError("the tokenizer has no eos_token, which separates documents: set one in its folder")
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content |= {"truncation": None, "padding": None}  # what its last user asked for
        self._text, self._vocabulary = json.dumps(content), vocabulary
        self._tokenizer = Tokenizer.from_str(self._text)
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.separator = self._checked([tokenizer.eos_token_id])

    def identity(self) -> dict[str, Any]:
        """What the tokens depend on, beside the text."""
        digest = blake2b(self._text.encode(), digest_size=16).hexdigest()
        return {"tokenizer": digest, "separator": int(self.separator[0]), "vocabulary": self._vocabulary}

    def encode(self, texts: list[str]) -> list[Tokens]:
        """The tokens of each text, without any that mark its beginning or end."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # twice as fast as with offsets
        return [self._checked(each.ids) for each in encoded]

    def _checked(self, tokens: list[int]) -> Tokens:
        if tokens and max(tokens) >= self._vocabulary:
            raise RecipeError(
                f"the tokenizer gives the token {max(tokens)}, but the model's vocabulary ends at "
                f"{self._vocabulary - 1}: they do not belong together"
            )
        return np.array(tokens, dtype=self.dtype)


class PartWriter:
    """One part of a cache in the making."""

    def __init__(self, folder: Path, name: str, separator: Tokens, stack: ExitStack) -> None:
        self._tokens = stack.enter_context((folder / f"{name}.tokens").open("wb"))
        self._ends = stack.enter_context((folder / f"{name}.ends").open("wb"))
        self._separator, self._digest = separator, blake2b(digest_size=16)
        self.tokens = self.documents = 0

    def write(self, tokens: Tokens) -> None:
        """More tokens of the document that is being written."""
        raw = tokens.tobytes()
        self._tokens.write(raw)
        self._digest.update(raw)
        self.tokens += len(tokens)

    def end_document(self) -> None:
        """Its separator, and where it ends."""
        self.write(self._separator)
        end = np.int64(self.tokens).tobytes()
        self._ends.write(end)
        self._digest.update(end)
        self.documents += 1

    def record(self) -> PartRecord:
        """What the part holds."""
        return PartRecord(self.documents, self.tokens, self._digest.hexdigest())


def write_tokens(
    documents: Iterable[Document],
    encoder: TokenEncoder,
    held_out: float,
    limit: int | None,
    folder: Path,
    report: Callable[[], None],
) -> dict[str, PartRecord]:
    """Write both parts of a cache into a folder and return what they hold; calls `report` after each batch.

    Reading ends with the document in which `limit` is reached: documents are whole, or refused if none would do.
    """
    with ExitStack() as stack:
        parts = {name: PartWriter(folder, name, encoder.separator, stack) for name in PARTS}
        for piece, tokens in _encoded(documents, encoder, report):
            if piece.first:
                part = parts[HELD_OUT if is_held_out(piece.text, held_out) else TRAINING]
                beginning, before = piece.text, part.tokens
            part.write(tokens)
            if limit is not None and part.tokens + 1 - before > limit:
                raise LongDocumentError(beginning, limit)
            if piece.last:
                part.end_document()
                if limit is not None and sum(each.tokens for each in parts.values()) >= limit:
                    break
    return {name: part.record() for name, part in parts.items()}


def _encoded(
    documents: Iterable[Document], encoder: TokenEncoder, report: Callable[[], None]
) -> Iterator[tuple[Piece, Tokens]]:
    for batch in batches(pieces(documents)):
        yield from zip(batch, encoder.encode([piece.text for piece in batch]), strict=True)
        report()


def is_held_out(beginning: str, share: float) -> bool:
    """Whether a document is kept from training, decided by its first piece alone."""
    return int.from_bytes(blake2b(beginning.encode(), digest_size=8).digest(), "big") < share * 2**64
