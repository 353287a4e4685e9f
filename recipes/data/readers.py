"""The documents of a data source, read as a stream: a long file or table is never in memory as a whole.

A document is an iterable of strings that together are its text, to be consumed before the next document is asked for.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosshead.common.errors import RecipeError, one_line

from ..schema.sections import DataSource
from .source_files import expanded, source_files


def missing_column(place: str, column: str, present: Iterable[str]) -> RecipeError:
    """The error where a table does not have the column."""
    return RecipeError(f"{place} has no column {column!r}: choose among {', '.join(map(repr, present)) or 'none'}")


def checked_text(value: Any, column: str, place: str) -> str:
    """The text of a document, empty where there is none; `RecipeError` where it is something else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecipeError(f"{place} holds {value!r:.40} in {column!r}, which is no text: choose another column")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{place} holds half a character in {column!r} (a lone surrogate): take it out") from None
    return value


_QUERY = re.compile(r"\?\S*")
"""The part of an address in which a signature may stand."""
EMPTY = ("BatchSize must be greater than 0", "corresponds to no data", "at least one example", "StopIteration")
"""What datasets says of a split, or a file of it, that has no rows."""


def hub_documents(source: DataSource) -> Iterator[str]:
    """The texts of a dataset in its own order, `RecipeError` where it cannot be loaded or read to its end."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RecipeError('Hub datasets need the datasets package: pip install "crosshead[train]"') from error
    path = expanded(source.path)
    options = {"split": source.split, "revision": source.revision, "streaming": source.streaming}
    try:
        with _silence():
            rows = load_dataset(path, source.subset, **options)
            if rows.column_names is not None and source.column in rows.column_names:
                rows = rows.select_columns([source.column])  # the others may be images
            for number, row in enumerate(rows, 1):
                yield _text(row, source, number)
    except RecipeError:
        raise
    except Exception as error:  # of the library, of the network, of the file formats
        reason = _QUERY.sub("", one_line(error.__cause__ or error))
        if any(words in reason for words in EMPTY):
            raise RecipeError(
                f"the Hub dataset {source.path} is empty in its split {source.split!r}, or a file of it is: choose "
                "another, or take the empty file out"
            ) from error
        raise RecipeError(f"the Hub dataset {source.path} cannot be read: {reason}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Without the bars and the log of datasets: its errors are told in one line of ours."""
    import datasets

    silent, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()


def _text(row: dict[str, Any], source: DataSource, number: int) -> str:
    place = f"row {number} of the Hub dataset {source.path}"
    if source.column not in row:
        raise missing_column(place, source.column, row)
    return checked_text(row[source.column], source.column, place)


BLOCK = 1 << 20
"""Bytes of a text file read at a time."""
ROWS = 256
"""Rows of a table read at a time."""
GZIP = b"\x1f\x8b"
"""How a compressed file begins, and no text."""

Document = Iterable[str]
Advance = Callable[[int], None]
"""Told how much more was read: bytes of files, documents of a dataset."""


def documents(source: DataSource, advance: Advance) -> Iterator[Document]:
    """All documents of a source, those without any text too; `RecipeError` where it cannot be read to its end."""
    if source.kind == "hub":
        for text in hub_documents(source):
            yield [text]
            advance(1)
        return
    for path in source_files(source):
        with _reading(path):
            _check_unpacked(path)
            yield from READERS[source.kind](path, source.column, advance)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """`RecipeError` where the system does not let a file be read."""
    try:
        yield
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or one_line(error)}") from error


def _check_unpacked(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise RecipeError(
                f"{path} is compressed (gzip): unpack it first, or give its folder with kind: hub, which reads such "
                "files, a line or row a document"
            )


def text_document(path: Path, column: str, advance: Advance) -> Iterator[Document]:
    """A file of plain text: one document."""
    yield _text_blocks(path, advance)


def _text_blocks(path: Path, advance: Advance) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin = 0
    with _reading(path), path.open("rb") as file:  # `documents` is left by then
        while True:
            raw = file.read(BLOCK)
            begin -= len(decoder.getstate()[0])  # a character that the block before left unfinished
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                byte = begin + error.start
                raise RecipeError(f"{path} is no UTF-8 text (byte {byte} is not): give plain text") from None
            if "\0" in text:
                raise RecipeError(f"{path} is a binary file (it holds zero bytes): give plain text")
            if not raw:
                return
            yield text
            begin = file.tell()
            advance(len(raw))


def json_lines(path: Path, column: str, advance: Advance) -> Iterator[Document]:
    """A file with one JSON object a line: each is a document."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield [_json_text(line, column, f"{path} line {number}")]
            advance(len(line))


def _json_text(line: bytes, column: str, place: str) -> str:
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{place} is no UTF-8 text (its byte {error.start} is not): give JSON lines") from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{place} is not JSON ({one_line(error)}): give one JSON object a line") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{place} holds {json.dumps(content)[:40]}, no JSON object: give one a line")
    if column not in content:
        raise missing_column(place, column, content)
    return checked_text(content[column], column, place)


def parquet_rows(path: Path, column: str, advance: Advance) -> Iterator[Document]:
    """A Parquet file: each row is a document."""
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise RecipeError('Parquet files need the datasets package: pip install "crosshead[train]"') from error
    size, done = path.stat().st_size, 0
    try:
        with parquet.ParquetFile(path) as table:
            if column not in table.schema_arrow.names:
                raise missing_column(str(path), column, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=ROWS, columns=[column]):
                for row, value in enumerate(batch.column(0).to_pylist(), done + 1):
                    yield [checked_text(value, column, f"{path} row {row}")]
                before, done = done, done + len(batch)
                rows = table.metadata.num_rows
                advance(size * done // rows - size * before // rows)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} holds a text in {column!r} that is no UTF-8, after row {done}") from error
    except ArrowException as error:
        raise RecipeError(f"{path} cannot be read as Parquet: {one_line(error)}") from error


READERS: dict[str, Callable[[Path, str, Advance], Iterator[Document]]] = {
    "text": text_document,
    "jsonl": json_lines,
    "parquet": parquet_rows,
}
"""Kind of local source -> how one of its files is read."""
