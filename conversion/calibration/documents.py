"""Calibration text from JSON lines or a dataset on the Hub: documents, or conversations in the chat template."""

from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.hub_rows import hub_rows
from crosshead.common.plain_text import conversation_text, json_object, read_text

from ..options import DATASET, is_dataset

LINES_SUFFIX = ".jsonl"
CHAT, TEXT = "messages", "text"
"""The fields of a line or row that are read; a conversation, if there is one."""
CHARACTERS = 2**20
"""Enough characters for all windows. Of a longer file, evenly spaced lines are read; of a dataset, the first rows."""
GOLDEN_RATIO = 0.618
Row = tuple[int, str, dict[str, Any]]
"""Its number, where it stands, and its fields."""


def has_documents(given: Path) -> bool:
    """Whether a calibration is JSON lines or a dataset."""
    return is_dataset(given) or given.suffix == LINES_SUFFIX


def read_documents(given: Path, tokenizer: Any) -> str:
    """The documents as one text; conversations are written by the tokenizer's chat template."""
    documents, size = {}, 0
    for number, place, row in _dataset_rows(given) if is_dataset(given) else _json_lines(given):
        documents[number] = _document(row, tokenizer, place)
        size += len(documents[number])
        if size >= CHARACTERS:
            break
    if not size:
        raise ConversionError(f"--calibration {given} contains no text: give one that does")
    return "\n\n".join(documents[number] for number in sorted(documents))


def _json_lines(path: Path) -> Iterator[Row]:
    content = read_text(path, ConversionError)
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    for index in spread_indices(len(lines)):
        number, line = lines[index]
        place = f"{path} line {number}"
        yield number, place, json_object(line, place, ConversionError)


def spread_indices(count: int) -> Iterator[int]:
    """All indices below `count`, in an order of which every beginning is spread evenly."""
    step = max(1, round(count * GOLDEN_RATIO))
    while gcd(step, count) > 1:
        step += 1
    return (number * step % count for number in range(count))


def _dataset_rows(given: Path) -> Iterator[Row]:
    name, *rest = str(given).removeprefix(DATASET).split(":")
    if not name or len(rest) > 2:
        raise ConversionError(f"--calibration {given} is not {DATASET}NAME, with :SUBSET or :SUBSET:SPLIT after it")
    subset, split = (*rest, *("", "train")[len(rest) :])
    rows = hub_rows(name, subset or None, (CHAT, TEXT), ConversionError, split=split, streaming=True)
    for number, row in enumerate(rows, 1):
        yield number, f"row {number} of the Hub dataset {name}", row


def _document(row: dict[str, Any], tokenizer: Any, place: str) -> str:
    """The text of a row, or its conversation in the chat template."""
    if row.get(CHAT) is not None and (tokenizer.chat_template is not None or TEXT not in row):
        return conversation_text(tokenizer, row[CHAT], place, ConversionError)
    if not isinstance(row.get(TEXT), str):
        names = ", ".join(map(repr, row)) or "none"
        raise ConversionError(f"{place} has no text in {TEXT!r} and no {CHAT!r}: its fields are {names}")
    return str(row[TEXT])
