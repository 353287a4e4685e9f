"""Read the documents of a data source as a stream; no long file or table is held in memory as a whole.

A document is an iterable of strings, the parts of its text. Exhaust it before you request the next document.
"""

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn

from crosshead.common.errors import RecipeError, one_line, os_errors
from crosshead.common.hub_rows import hub_rows
from crosshead.common.plain_text import check_characters, conversation_text, json_object

from ..schema.sections import DataSource

SUFFIXES = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}
"""Source kind -> suffix of the files of a folder that belong to the source."""
BLOCK = 1 << 20
"""Number of bytes of a text file that are read at a time."""
ROWS = 256
"""Number of rows of a Parquet table that are read at a time."""
GZIP = b"\x1f\x8b"
"""Magic number of gzip files; valid text never begins with it."""

BYTE_ORDER_MARK = "\ufeff"
"""UTF-8 byte order mark, which some editors write at the start of a text file; it is removed."""

Document = Iterable[str]
Row = tuple[dict[str, Any], str]
"""The fields of a row, and its location for error messages."""
Advance = Callable[[int], None]
"""Progress callback, called with the amount that was read: bytes of files, or documents of a Hub dataset."""


def documents(source: DataSource, tokenizer: Any, advance: Advance) -> Iterator[Document]:
    """Yield all documents of a source, including empty ones; raise `RecipeError` if the source cannot be read.

    A list of messages is a conversation, which the tokenizer's chat template renders as text.
    """
    if source.kind == "text":
        for path in source_files(source):
            _check_not_compressed(path)
            yield _text_blocks(path, advance)
    else:
        rows = _hub_rows(source, advance) if source.kind == "hub" else _file_rows(source, advance)
        for row, location in rows:
            yield [_document(row, source.column, location, tokenizer)]


def _file_rows(source: DataSource, advance: Advance) -> Iterator[Row]:
    for path in source_files(source):
        _check_not_compressed(path)
        with os_errors(RecipeError, f"{path} cannot be read"):
            if source.kind == "jsonl":
                yield from _json_lines(path, advance)
            else:
                yield from _parquet_rows(path, source.column, advance)


def _check_not_compressed(path: Path) -> None:
    with os_errors(RecipeError, f"{path} cannot be read"), path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise RecipeError(
                f"{path} is compressed (gzip): unpack it, or give its folder with kind: hub, which reads such "
                "files with a document per line or row"
            )


def source_files(source: DataSource) -> list[Path]:
    """Return the files of a local source, sorted by name; raise `RecipeError` if there are none."""
    root = Path(source.path)
    if root.is_file():
        return [root]
    if root.is_dir():
        files, suffix = files_in(root, SUFFIXES[source.kind]), SUFFIXES[source.kind]
        advice = f"no {suffix} file at any depth: name its files by a pattern, such as {source.path}/**/*"
    else:
        for part in (root, *root.parents):
            if escape(part.name) != part.name:
                _check_folders(part if part.name == "**" else part.parent)
        files = sorted(path for path in map(Path, glob(str(root), recursive=True)) if path.is_file())
        advice = "no file there: check the path"
    if not files:
        raise RecipeError(f"the {source.kind} source {source.path} has {advice}")
    return files


def files_in(folder: Path, suffix: str | tuple[str, ...]) -> list[Path]:
    """Return the files at any depth whose names end with `suffix`, sorted.

    Links are followed; a folder that is reached by several links is read once.
    """
    paths, visited = list[Path](), set[str]()
    for root, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        folders.sort()
        if (real := os.path.realpath(root)) in visited:
            folders.clear()  # without this, a link to a parent folder would loop forever
            continue
        visited.add(real)
        paths += [Path(root, name) for name in names if name.lower().endswith(suffix)]
    return sorted(path for path in paths if path.is_file())


def _check_folders(pattern: Path) -> None:
    """Raise `RecipeError` if a folder that matches the pattern is unreadable: `glob` would skip it silently."""
    for path in filter(os.path.isdir, glob(str(pattern), recursive=True)):
        try:
            os.scandir(path).close()
        except OSError as error:
            _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise RecipeError(
        f"the folder {error.filename} cannot be read: {error.strerror}: make it readable, or move it elsewhere"
    ) from error


def total_size(source: DataSource) -> int | None:
    """Return the total size of a source's files in bytes; None for a Hub dataset, whose size is unknown."""
    return None if source.kind == "hub" else sum(path.stat().st_size for path in source_files(source))


def source_fingerprint(source: DataSource) -> dict[str, Any]:
    """Return everything that determines the documents of a source, in JSON types, as the cache key."""
    content: dict[str, Any] = {"kind": source.kind, "max_tokens": source.max_tokens}
    if source.kind == "hub":
        files = files_in(Path(source.path), "") if os.path.isdir(source.path) else []
        content |= {"name": source.path, "subset": source.subset, "split": source.split, "revision": source.revision}
    else:
        files = source_files(source)
    content |= {"files": file_states(files)}
    return content if source.kind == "text" else content | {"column": source.column}


def file_states(files: list[Path]) -> list[Any]:
    """Return path, size in bytes and modification time of each file."""
    states = ((path, path.stat()) for path in files)
    return [(str(path.resolve()), state.st_size, state.st_mtime_ns) for path, state in states]


def _text_blocks(path: Path, advance: Advance) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin, mark = 0, BYTE_ORDER_MARK
    with os_errors(RecipeError, f"{path} cannot be read"), path.open("rb") as file:
        while True:
            raw = file.read(BLOCK)
            begin -= len(decoder.getstate()[0])  # bytes of an incomplete character at the end of the previous block
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                byte = begin + error.start
                raise RecipeError(f"{path} is not UTF-8 text (byte {byte} is invalid): give plain text") from None
            if "\0" in text:
                raise RecipeError(f"{path} is a binary file (it contains zero bytes): give plain text")
            if not raw:
                return
            yield text.removeprefix(mark)
            mark = "" if text else mark  # a block may end within a character
            begin = file.tell()
            advance(len(raw))


def _json_lines(path: Path, advance: Advance) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content, location = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, f"{path} line {number}"
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise RecipeError(
                    f"{location} is not UTF-8 text (its byte {error.start} is invalid): give JSON lines"
                ) from None
            if not line.isspace():
                yield json_object(text, location, RecipeError), location
            advance(len(line))


def _parquet_rows(path: Path, column: str, advance: Advance) -> Iterator[Row]:
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
                    yield {column: value}, f"{path} row {row}"
                before, done = done, done + len(batch)
                rows = table.metadata.num_rows
                advance(size * done // rows - size * before // rows)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} has a text in {column!r} that is not UTF-8, after row {done}") from error
    except ArrowException as error:
        raise RecipeError(f"{path} cannot be read as Parquet: {one_line(error)}") from error


def _hub_rows(source: DataSource, advance: Advance) -> Iterator[Row]:
    options = {"split": source.split, "revision": source.revision, "streaming": source.streaming}
    rows = hub_rows(source.path, source.subset, [source.column], RecipeError, **options)
    for number, row in enumerate(rows, 1):
        yield row, f"row {number} of the Hub dataset {source.path}"
        advance(1)


def missing_column(location: str, column: str, present: Iterable[str]) -> RecipeError:
    """Return the error for a column that a table does not have."""
    return RecipeError(f"{location} has no column {column!r}: choose among {', '.join(map(repr, present)) or 'none'}")


def _document(row: dict[str, Any], column: str, location: str, tokenizer: Any) -> str:
    """Return the text of a document or conversation; empty for null and for an empty list of messages."""
    if column not in row:
        raise missing_column(location, column, row)
    value = row[column]
    if value is None or value == []:
        return ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        # Strip the white space after the last turn, so that the text ends with its end-of-turn token.
        value = conversation_text(tokenizer, value, location, RecipeError).rstrip()
    if not isinstance(value, str):
        raise RecipeError(f"{location} has {value!r:.40} in {column!r}, which is not text: choose another column")
    return check_characters(value, f"{location} in {column!r}", RecipeError)
