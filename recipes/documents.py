"""The documents of a data source, read as a stream: a long file or table is never in memory as a whole.

A document is an iterable of strings that together are its text, to be consumed before the next document is asked for.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .column_text import checked_text, missing_column
from .data_options import DataSource
from .errors import RecipeError, one_line
from .hub_documents import hub_documents
from .source_files import source_files

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
