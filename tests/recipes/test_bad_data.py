"""Bad data: one clear line each, and nothing left in the cache."""

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.readers import SUFFIXES, source_fingerprint
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.sections import DataOptions, DataSource
from toy_data import separating_tokenizer, toy_texts, words, write_jsonl, write_parquet

GOOD = words(*range(1, 40))


@dataclass(frozen=True)
class Case:
    """A source that must be refused, and words of its one-line error."""

    words: str
    make: Callable[[Path], object]
    kind: str = "text"
    path: str = "source"
    options: dict[str, Any] = field(default_factory=dict)


def file(content: str | bytes) -> Callable[[Path], object]:
    """Return a function that writes a file with this content."""
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def files(**contents: str) -> Callable[[Path], object]:
    """Return a function that makes a folder with these files; two underscores in a name stand for a dot."""

    def make(path: Path) -> None:
        path.mkdir()
        for name, content in contents.items():
            (path / name.replace("__", ".")).write_text(content)

    return make


def rows(*values: Any) -> Callable[[Path], object]:
    """Return a function that writes a Parquet file with these values in its text column."""
    return lambda path: write_parquet(path, list(values))


def column(values: Any) -> Callable[[Path], object]:
    """Return a function that writes a Parquet file with this Arrow array as its text column."""
    return lambda path: parquet.write_table(pyarrow.table({"text": values}), path)


def truncated(make: Callable[[Path], object], count: int) -> Callable[[Path], object]:
    """Return a function that makes a file without its last `count` bytes."""

    def short(path: Path) -> None:
        make(path)
        os.truncate(path, path.stat().st_size - count)

    return short


def write_corrupt_parquet(path: Path) -> None:
    """Write a Parquet file with zeros over a part of its data."""
    write_parquet(path, toy_texts(300))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 10 : len(raw) // 3] = bytes(len(raw) // 3 - len(raw) // 10)
    path.write_bytes(raw)


LINE = '{"text": "w1 w2"}\n'
NOT_UTF8 = pyarrow.array([b"w1", b"\xff\xfe"]).view(pyarrow.string())
TEXT = {
    "no file": Case("source", lambda path: None),
    "no file by this pattern": Case("source/*.md", files(a__txt="w1"), path="source/*.md"),
    "a folder without text": Case(".txt", files(a__md="w1")),
    "a folder of nothing": Case(".txt", files()),
    "a pattern for folders alone": Case("source/*", lambda path: (path / "a").mkdir(parents=True), path="source/*"),
    "a pipe": Case("source", os.mkfifo),
    "empty file": Case("empty", file("")),
    "blank file": Case("empty", file(" \n\t\n" * 1000)),
    "empty files": Case("empty", files(a__txt="", b__txt=" ")),
    "binary file": Case("binary", file(b"text\0text")),
    "invalid UTF-8": Case("byte 9 ", file(b"w1 w2 w3 \xff w4")),
    "invalid far from the beginning": Case("byte 3000003 ", file(b"w1 " * 1_000_001 + b"\x80")),
    "half a character at the end": Case("byte 3 ", file(b"w1 \xe6\xbc")),
    "UTF-16": Case("byte 0 ", file("w1 w2".encode("utf-16"))),
    "a picture": Case("byte 0 ", file(b"\x89PNG\r\n\x1a\n\0")),
    "shorter than a window": Case("length=8", file("w1 w2")),
    "no window within max_tokens": Case(
        "3 tokens", lambda path: write_jsonl(path, ["w1 w2"] * 99), "jsonl", options={"max_tokens": 3}
    ),
    "a document longer than the cache": Case("'w1 w2 w3", file(GOOD), options={"max_tokens": 20}),
    "a row longer than the cache": Case(
        "'w1 w2 w3",
        lambda path: write_jsonl(path, ["w9 w8", GOOD]),
        "jsonl",
        options={"max_tokens": 39},
    ),
    "compressed": Case("gzip", file(gzip.compress(GOOD.encode()))),
    "Parquet as text": Case("UTF-8", rows(GOOD)),
}
JSON_LINES = {
    "no JSON": Case("line 2 ", file(LINE + "w1 w2\n"), "jsonl"),
    "a line cut short": Case("line 2 ", file(LINE + LINE[:9]), "jsonl"),
    "a list of objects": Case("line 1 ", file('[\n{"text": "w1"}\n]'), "jsonl"),
    "a list on one line": Case("[{", file('[{"text": "w1"}]'), "jsonl"),
    "a word": Case('"w1"', file(LINE + '"w1"'), "jsonl"),
    "without bottom": Case("line 1 ", file("[" * 100_000), "jsonl"),
    "a byte order mark in the middle": Case("line 2 ", file(LINE + "\ufeff" + LINE), "jsonl"),
    "missing column": Case("'txt'", file(LINE + '{"txt": "w1"}'), "jsonl"),
    "another missing column": Case("'body'", file(LINE), "jsonl", options={"column": "body"}),
    "no column at all": Case("'text'", file("{}"), "jsonl"),
    "a number for a text": Case("5 in 'text'", file(LINE + '{"text": 5}'), "jsonl"),
    "a list for a text": Case("['w1'] in 'text'", file('{"text": ["w1"]}'), "jsonl"),
    "half a surrogate": Case("line 1 ", file('{"text": "w1 \\ud800"}'), "jsonl"),
    "invalid line": Case("byte 10", file(LINE.encode() + b'{"text": "\xff"}'), "jsonl"),
    "binary as lines": Case("UTF-8", file(b"\x89PNG\r\n\x1a\n\0"), "jsonl"),
    "compressed lines": Case("gzip", file(gzip.compress(LINE.encode())), "jsonl"),
    "an empty file of lines": Case("empty", file(""), "jsonl"),
    "lines without text": Case("empty", file('{"text": ""}\n{"text": null}\n'), "jsonl"),
    "a folder without lines": Case(".jsonl", files(a__json=LINE), "jsonl"),
}
PARQUET = {
    "text as Parquet": Case("Parquet", file(GOOD), "parquet"),
    "an empty file as Parquet": Case("Parquet", file(""), "parquet"),
    "Parquet without its end": Case("Parquet", truncated(rows(GOOD), 20), "parquet"),
    "scratched Parquet": Case("source", write_corrupt_parquet, "parquet"),
    "compressed Parquet": Case("gzip", file(gzip.compress(b"PAR1")), "parquet"),
    "no column in Parquet": Case("'body'", rows(GOOD), "parquet", options={"column": "body"}),
    "numbers in Parquet": Case("0 in 'number'", rows(GOOD), "parquet", options={"column": "number"}),
    "bytes in Parquet": Case("b'w1' in 'text'", column(pyarrow.array([None, b"w1"])), "parquet"),
    "invalid UTF-8 in Parquet": Case("UTF-8", column(NOT_UTF8), "parquet"),
    "no rows": Case("empty", rows(), "parquet"),
    "no text in Parquet": Case("empty", column(pyarrow.array([None, ""], pyarrow.string())), "parquet"),
}
HUB = {
    "no dataset": Case("Hub dataset", lambda path: None, "hub", path="no/such"),
    "no dataset's name": Case("Hub dataset", lambda path: None, "hub", path="a b/c:d"),
    "no split": Case("none", files(train__jsonl=LINE), "hub", options={"split": "none"}),
    "no subset": Case("'none'", files(train__jsonl=LINE), "hub", options={"subset": "none"}),
    "no column in a dataset": Case("'body'", files(train__jsonl=LINE), "hub",
                                   options={"column": "body"}),
    "no column in a stream": Case("'body'", files(train__jsonl=LINE), "hub",
                                  options={"column": "body", "streaming": True}),
    "numbers in a dataset": Case("row 1 ", files(train__jsonl='{"text": 5}'), "hub"),
    "a broken file of a dataset": Case("source", files(train__jsonl=LINE + '{"text'), "hub"),
    "a broken file of a stream": Case("source", files(train__jsonl=LINE + '{"text'), "hub",
                                      options={"streaming": True}),
    "a dataset of nothing": Case("empty", files(train__csv="text\n"), "hub"),
    "a stream of nothing": Case("empty", files(train__csv="text\n"), "hub", options={"streaming": True}),
}  # fmt: skip
CASES = TEXT | JSON_LINES | PARQUET | HUB


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_source_gives_one_line_error_and_leaves_no_cache(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    case.make(Path("source"))
    source = DataSource(case.path, case.kind, **case.options)
    with pytest.raises(RecipeError) as caught:
        open_data(DataOptions((source,), length=8, cache="cache"), separating_tokenizer(), 61)
    message = str(caught.value)
    assert case.words in message
    assert case.path in message and "\n" not in message
    assert len(message) < 300
    left = [path.name for path in Path("cache").iterdir() if path.is_dir()] if Path("cache").exists() else []
    assert left == [] or "length=8" in message


UNREADABLE = [("text", 0), ("text", 1), ("jsonl", 0), ("jsonl", 1), ("parquet", 0)]


@pytest.mark.parametrize(("kind", "opened_before"), UNREADABLE)
def test_unreadable_file_is_refused(tmp_path, monkeypatch, kind, opened_before):
    path, attempts = write_jsonl(tmp_path / "a", [GOOD]), []
    opened = Path.open

    def refuse(self, *arguments, **options):
        if self == path:
            attempts.append(self)
            if len(attempts) > opened_before:
                raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    options = DataOptions((DataSource(str(path), kind),), length=8, cache=str(tmp_path / "cache"))
    with pytest.raises(RecipeError, match=r"/a .*Permission denied"):
        open_data(options, separating_tokenizer(), 61)


UNLISTABLE = [*((kind, "") for kind in ("text", "jsonl", "parquet", "hub")), ("text", "*/b/*"), ("text", "**/*.txt")]


@pytest.mark.parametrize(("kind", "pattern"), UNLISTABLE)
def test_unlistable_folder_is_refused(tmp_path, monkeypatch, kind, pattern):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for suffix in SUFFIXES.values():
        (tmp_path / "a" / f"a{suffix}").write_text("w1")
    listed = os.scandir

    def refuse(path):
        if Path(path) == tmp_path / "a" / "b":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    source = DataSource(str(tmp_path / pattern), kind)
    with pytest.raises(RecipeError, match=r"/a/b .*Permission denied"):
        source_fingerprint(source)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("text", {"column": "body"}, "column='body'.* 'text'.*'jsonl', 'parquet', 'hub'"),
        ("text", {"subset": "en"}, "subset='en'.*'hub'"),
        ("jsonl", {"split": "test"}, "split='test'.*'jsonl'"),
        ("jsonl", {"revision": "v1"}, "revision='v1'"),
        ("parquet", {"streaming": True}, "streaming=True"),
    ],
)
def test_source_options_of_another_kind_are_refused(kind, options, message):
    with pytest.raises(RecipeError, match=message):
        DataSource("a", kind, **options)
    defaults = {"column": "text", "subset": None, "split": "train", "revision": None, "streaming": False}
    assert DataSource("a", kind, **defaults) == DataSource("a", kind)


def test_source_weights_without_common_period_are_refused(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", [GOOD]))
    sources = DataSource(path, "jsonl", weight=0.1 + 0.2), DataSource(path, "jsonl")
    data = open_data(DataOptions(sources, length=8, cache=str(tmp_path / "cache")), separating_tokenizer(), 61)
    with pytest.raises(RecipeError, match=r"\[0\.30000000000000004, 1\.0\]"):
        data.samples(10, seed=0)
