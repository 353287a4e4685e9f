"""Calibration text from JSON lines or a dataset on the Hub: documents, or conversations in the chat template."""

from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.hub_rows import hub_rows
from crosshead.common.plain_text import check_characters, conversation_text, json_object, read_text

from ..options import DATASET, is_dataset

LINES_SUFFIX = ".jsonl"
"""File suffix of JSON Lines."""
CHAT, TEXT = "messages", "text"
"""Fields of a line or row that are read: a conversation if there is one, else a text."""
CHARACTERS = 2**20
"""Number of characters to read: enough for all windows. In a longer file, lines are read in the order of
`spread_indices`; a dataset is read from its first row."""
GOLDEN_RATIO = 0.618
"""Step of `spread_indices` relative to the number of lines."""
Row = tuple[int, str, dict[str, Any]]
"""(Number of the line or row, its location for error messages, its fields)."""


def has_documents(calibration: Path) -> bool:
    """True if a --calibration value is a JSON Lines file or a dataset."""
    return is_dataset(calibration) or calibration.suffix.lower() == LINES_SUFFIX


def read_documents(calibration: Path, tokenizer: Any) -> str:
    """Return the documents as one text; conversations are formatted by the tokenizer's chat template."""
    documents, size = {}, 0
    for number, location, row in _dataset_rows(calibration) if is_dataset(calibration) else _json_lines(calibration):
        documents[number] = _document(row, tokenizer, location)
        size += len(documents[number])
        if size >= CHARACTERS:
            break
    if not size:
        raise ConversionError(f"--calibration {calibration} contains no text: give one that does")
    return "\n\n".join(documents[number] for number in sorted(documents))


def _json_lines(path: Path) -> Iterator[Row]:
    """Yield the lines of a JSON Lines file in the order of `spread_indices`."""
    content = read_text(path, ConversionError)
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    for index in spread_indices(len(lines)):
        number, line = lines[index]
        location = f"{path} line {number}"
        yield number, location, json_object(line, location, ConversionError)


def spread_indices(count: int) -> Iterator[int]:
    """Return all indices below `count`, in an order whose every prefix is spread evenly over them."""
    step = max(1, round(count * GOLDEN_RATIO))
    while gcd(step, count) > 1:
        step += 1
    return (number * step % count for number in range(count))


def _dataset_rows(calibration: Path) -> Iterator[Row]:
    """Yield the rows of a Hub dataset, named as `datasets:NAME:SUBSET:SPLIT`, in order."""
    name, *rest = str(calibration).removeprefix(DATASET).split(":")
    if not name or len(rest) > 2:
        raise ConversionError(
            f"--calibration {calibration} is not {DATASET}NAME, with :SUBSET or :SUBSET:SPLIT after it"
        )
    subset, split = (*rest, *("", "train")[len(rest) :])
    rows = hub_rows(name, subset or None, (CHAT, TEXT), ConversionError, split=split, streaming=True)
    for number, row in enumerate(rows, 1):
        yield number, f"row {number} of the Hub dataset {name}", row


def _document(row: dict[str, Any], tokenizer: Any, location: str) -> str:
    """Return the text of a row, or its conversation formatted by the chat template."""
    if row.get(CHAT) is not None and (tokenizer.chat_template is not None or TEXT not in row):
        text = conversation_text(tokenizer, row[CHAT], location, ConversionError)
        return check_characters(text, location, ConversionError)
    if not isinstance(row.get(TEXT), str):
        names = ", ".join(map(repr, row)) or "none"
        raise ConversionError(f"{location} has no text in {TEXT!r} and no {CHAT!r}: its fields are {names}")
    return check_characters(row[TEXT], location, ConversionError)
