"""Every kind of source yields its documents whole and in order, and reports its progress."""

import codecs
import json

import datasets
import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.data import readers as module
from crosshead.recipes.data.readers import documents, source_files, source_fingerprint, total_size
from crosshead.recipes.schema.sections import DataSource
from toy_data import write_jsonl, write_parquet

TEXTS = ["one\ntwo", "Größe 漢字 🙂", "", "four\r\n", "  five"] * 3


def read_all(source):
    """Return all texts, and the reports of progress."""
    reports = []
    return ["".join(document) for document in documents(source, None, reports.append)], reports


def source_of(path, kind, **options):
    return DataSource(str(path), kind, **options)


def test_text_file_is_one_unchanged_document(tmp_path, monkeypatch):
    content = "Größe\r\n漢字 🙂\n" * 50
    (tmp_path / "a.txt").write_bytes(content.encode())
    for block in (1, 2, 3, 5, 1 << 20):  # multi-byte characters cross the blocks' borders
        monkeypatch.setattr(module, "BLOCK", block)
        source = source_of(tmp_path / "a.txt", "text")
        texts, reports = read_all(source)
        assert texts == [content]
        assert sum(reports) == total_size(source) == len(content.encode())


@pytest.mark.parametrize(("kind", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_each_line_or_row_is_one_document(tmp_path, kind, write, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 4)
    write(tmp_path / "a", TEXTS, column="body")
    source = source_of(tmp_path / "a", kind, column="body")
    texts, reports = read_all(source)
    assert texts == TEXTS
    assert sum(reports) == total_size(source) == (tmp_path / "a").stat().st_size


def test_leading_byte_order_mark_is_dropped(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "eins\ufeffzwei".encode())
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "b"}\n')
    for block in (1, 2, 1 << 20):
        monkeypatch.setattr(module, "BLOCK", block)
        assert read_all(source_of(tmp_path / "a.txt", "text"))[0] == ["eins\ufeffzwei"]
    assert read_all(source_of(tmp_path / "a.jsonl", "jsonl"))[0] == ["a", "b"]


def test_suffix_of_files_in_folder_may_be_uppercase(tmp_path):
    for name in ("a.txt", "b.TXT", "c.md"):
        (tmp_path / name).write_text(name)
    assert read_all(source_of(tmp_path, "text"))[0] == ["a.txt", "b.TXT"]


def test_symlinked_folders_are_read_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "b.txt").write_text("b")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("a")
    (tmp_path / "d" / "books").symlink_to(tmp_path / "real")
    (tmp_path / "d" / "more").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "above").symlink_to(tmp_path / "d")
    assert source_files(source_of(tmp_path / "d", "text")) == [
        tmp_path / "d" / "a.txt",
        tmp_path / "d" / "books" / "b.txt",
    ]


def test_json_lines_without_text_are_empty_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n\n  \n{"text": null}\n{"other": 1, "text": "b"}')
    assert read_all(source_of(tmp_path / "a.jsonl", "jsonl"))[0] == ["a", "", "b"]


def test_parquet_null_is_empty_document(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "b"])
    assert read_all(source_of(tmp_path / "a.parquet", "parquet"))[0] == ["a", "", "b"]


def test_folder_and_glob_pattern_yield_sorted_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/c.md", "d.jsonl", "a/b/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_all(source_of(tmp_path, "text"))[0] == ["a/b/e.txt", "a/z.txt", "b.txt"]
    assert read_all(source_of(tmp_path / "**" / "*.md", "text"))[0] == ["a/c.md"]
    assert read_all(source_of(tmp_path / "a" / "*", "text"))[0] == ["a/c.md", "a/z.txt"]
    assert source_files(source_of(tmp_path, "jsonl")) == [tmp_path / "d.jsonl"]


def test_file_name_with_glob_characters_is_read(tmp_path):
    (tmp_path / "a[1].txt").write_text("here")
    assert read_all(source_of(tmp_path / "a[1].txt", "text"))[0] == ["here"]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_yields_documents_of_split(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "copy").mkdir()
    rows = [{"number": number, "body": text} for number, text in enumerate(TEXTS)]
    (tmp_path / "copy" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "copy" / "test.jsonl").write_text('{"number": 0, "body": "of the test"}\n')
    source = source_of(tmp_path / "copy", "hub", column="body", streaming=streaming)
    texts, reports = read_all(source)
    assert texts == TEXTS
    assert reports == [1] * len(TEXTS) and total_size(source) is None
    assert read_all(source_of(tmp_path / "copy", "hub", column="body", split="test"))[0] == ["of the test"]


def test_hub_options_are_passed_to_load_dataset(monkeypatch):
    calls = []

    def load_dataset(*names, **options):
        calls.append((names, options))
        return datasets.Dataset.from_dict({"text": ["a"], "number": [1]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = source_of("organisation/set", "hub", subset="en", split="validation", revision="v1", streaming=True)
    assert read_all(source)[0] == ["a"]
    assert calls == [
        (("organisation/set", "en"), {"split": "validation", "revision": "v1", "streaming": True}),
    ]


def test_source_fingerprint_changes_with_content_and_options(tmp_path):
    path = tmp_path / "a.data"
    write_jsonl(path, ["a"])
    first = source_of(path, "jsonl")
    fingerprints = [
        source_fingerprint(first),
        source_fingerprint(source_of(path, "text")),
        source_fingerprint(source_of(path, "jsonl", column="b")),
    ]
    fingerprints += [source_fingerprint(source_of(path, "jsonl", max_tokens=9))]
    path.write_text('{"text": "b"}\n')
    fingerprints += [source_fingerprint(first)]
    write_jsonl(tmp_path / "b.jsonl", ["a"])
    fingerprints += [source_fingerprint(source_of(tmp_path, "jsonl"))]
    fingerprints += [
        source_fingerprint(source_of("a/b", "hub", **options))
        for options in ({}, {"revision": "v1"}, {"split": "test"})
    ]
    assert all(one != other for index, one in enumerate(fingerprints) for other in fingerprints[:index])
    assert source_fingerprint(source_of(path, "jsonl", weight=3.0)) == fingerprints[4]
    assert json.loads(json.dumps(source_fingerprint(first))) is not None


@pytest.mark.parametrize(("ending", "kind"), [("jsonl", "jsonl"), ("json", "jsonl"), ("PARQUET", "parquet")])
def test_source_of_another_format_without_its_kind_is_refused(ending, kind):
    with pytest.raises(RecipeError, match=f"path=folder/rows.{ending} would be read as plain text.*`kind: {kind}`"):
        source_of(f"folder/rows.{ending}", "text")


def test_fingerprint_of_local_hub_dataset_follows_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    before = source_fingerprint(source_of(tmp_path, "hub"))
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    assert source_fingerprint(source_of(tmp_path, "hub")) != before
