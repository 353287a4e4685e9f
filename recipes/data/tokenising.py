"""Tokenises documents to disk: a file of all tokens, and a file of the ends of documents."""

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
"""Characters: a longer document is tokenised in pieces, cut at the end of a line, where a token may differ."""
BATCH = 1 << 21
"""Characters that are tokenised at a time."""
BEGINNING = 60
"""Characters of a document that an error quotes."""
TRAINING, HELD_OUT = "training", "held_out"
PARTS = (TRAINING, HELD_OUT)

Tokens = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class PartRecord:
    """The content of one part of a cache."""

    documents: int
    tokens: int
    """Separators included."""
    digest: str
    """Of the tokens and of the ends of documents."""


@dataclass(frozen=True)
class Piece:
    """A part of a document."""

    text: str
    first: bool
    last: bool


def pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """All documents, cut into pieces that do not depend on the parts in which a document was read."""
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
    """Pieces in groups of about `BATCH` characters."""
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


class LongDocumentError(RecipeError):
    """One document is longer than `max_tokens`."""


class TokenEncoder:
    """A copy of a tokenizer, whose tokens are checked against the model's vocabulary."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        separator = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        if separator is None:
            raise RecipeError(
                "the tokenizer has no eos_token or sep_token, which separate documents: set one in its folder"
            )
        self.tokenizer = tokenizer
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content |= {"truncation": None, "padding": None}  # settings of its last call
        self._text, self._vocabulary = json.dumps(content), vocabulary
        self._tokenizer = Tokenizer.from_str(self._text)
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.separator = self._checked([separator])

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the tokens of a text depend on."""
        parts = [self._text, self.tokenizer.chat_template]
        if self.tokenizer.chat_template:
            parts.append(self.tokenizer.special_tokens_map)  # which a template may write
        digest = blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        return {"tokenizer": digest, "separator": int(self.separator[0]), "vocabulary": self._vocabulary}

    def encode(self, texts: list[str]) -> list[Tokens]:
        """The tokens of each text, without special tokens at its beginning or end."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # twice as fast as with offsets
        return [self._checked(each.ids) for each in encoded]

    def _checked(self, tokens: list[int]) -> Tokens:
        check_vocabulary(tokens, self._vocabulary)
        return np.array(tokens, dtype=self.dtype)


def check_vocabulary(tokens: list[int], vocabulary: int) -> None:
    """`RecipeError` for a token that the model does not have."""
    if max(tokens, default=0) >= vocabulary:
        raise RecipeError(
            f"the tokenizer has the token {max(tokens)}, but the model's vocabulary ends at {vocabulary - 1}: use "
            "the tokenizer of the model"
        )


class PartWriter:
    """Writes one part of a cache."""

    def __init__(self, folder: Path, name: str, separator: Tokens, stack: ExitStack) -> None:
        self._tokens = stack.enter_context((folder / f"{name}.tokens").open("wb"))
        self._ends = stack.enter_context((folder / f"{name}.ends").open("wb"))
        self._separator, self._digest, self._last = separator, blake2b(digest_size=16), separator[:0]
        self.tokens = self.documents = 0

    def write(self, tokens: Tokens) -> None:
        """Add tokens to the current document."""
        raw = tokens.tobytes()
        self._tokens.write(raw)
        self._digest.update(raw)
        self.tokens += len(tokens)
        self._last = tokens[-1:]

    def end_document(self) -> None:
        """Add the separator, which a conversation may have as its last token, and record the end."""
        if not np.array_equal(self._last, self._separator):
            self.write(self._separator)
        end = np.int64(self.tokens).tobytes()
        self._ends.write(end)
        self._digest.update(end)
        self.documents += 1

    def record(self) -> PartRecord:
        """The content of the part."""
        return PartRecord(self.documents, self.tokens, self._digest.hexdigest())


def write_tokens(
    documents: Iterable[Document],
    encoder: TokenEncoder,
    held_out: float,
    limit: int | None,
    folder: Path,
    report: Callable[[], None],
) -> dict[str, PartRecord]:
    """Write both parts of a cache into a folder; calls `report` after each batch.

    Reading stops after the document that reaches `limit`; a document that alone is longer is an error.
    """
    with ExitStack() as stack:
        parts = {name: PartWriter(folder, name, encoder.separator, stack) for name in PARTS}
        for piece, tokens in _encoded(documents, encoder, report):
            if piece.first:
                part = parts[HELD_OUT if is_held_out(piece.text, held_out) else TRAINING]
                beginning, before = piece.text, part.tokens
            part.write(tokens)
            if limit is not None and part.tokens + 1 - before > limit:
                words = " ".join(beginning[:BEGINNING].split())
                raise LongDocumentError(
                    f"the document that begins {words!r} is longer than max_tokens={limit}, and documents are never "
                    "cut: raise it, or divide the document"
                )
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
    """Whether a document is used for evaluation, decided by its first piece alone."""
    return int.from_bytes(blake2b(beginning.encode(), digest_size=8).digest(), "big") < share * 2**64
