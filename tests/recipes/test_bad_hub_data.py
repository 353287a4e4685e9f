"""Bad data of kind `hub`: stderr holds only the one-line error, and URLs are shown without signatures."""

import os
import re
import subprocess
import sys

import datasets
import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.readers import documents
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.sections import DataOptions, DataSource
from toy_data import separating_tokenizer, write_jsonl, write_parquet

READ = """
import sys
from crosshead.recipes.schema.sections import DataSource
from crosshead.recipes.data.readers import documents
from crosshead.common.errors import RecipeError

for name in sys.argv[1:]:
    for streaming in (False, True):
        try:
            list(documents(DataSource(name, "hub", streaming=streaming), None, lambda count: None))
        except RecipeError as error:
            print(error, file=sys.stderr)
"""
EXPECTED = {
    "broken": "broken.*JSON",
    "number": "number.* 5 in 'text'",
    "no_rows": "no_rows.*'train'",
    "one_without_rows": "one_without_rows.*'train'",
    "no_lines": "no_lines",
}


@pytest.mark.slow
def test_bad_dataset_prints_one_line_on_stderr(tmp_path):
    for name in EXPECTED:
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"text": "w1"}\n{"text')
    (tmp_path / "number" / "train.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "no_lines" / "train.jsonl").write_text("")
    write_parquet(tmp_path / "no_rows" / "train.parquet", [])
    write_parquet(tmp_path / "one_without_rows" / "train-0.parquet", ["w1"])
    write_parquet(tmp_path / "one_without_rows" / "train-1.parquet", [])
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", READ, *EXPECTED], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    lines = ran.stderr.splitlines()
    assert len(lines) == 2 * len(EXPECTED), ran.stderr
    for line, words in zip(lines, [words for words in EXPECTED.values() for _ in range(2)], strict=True):
        assert re.search(words, line), line


def test_datasets_log_settings_are_restored_after_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "train.jsonl", ["w1", "w2"])
    before = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    reading = documents(DataSource(str(tmp_path), "hub"), None, lambda count: None)
    next(reading)
    assert (datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()) == (
        True,
        datasets.logging.CRITICAL,
    )
    reading.close()
    assert (datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()) == before


def test_hub_url_in_error_has_no_signature(monkeypatch, tmp_path):
    def refuse(*names, **options):
        raise OSError("403 Forbidden for url https://cdn.example.org/file?Signature=secret&Key=1 (id\n 7)")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    options = DataOptions((DataSource("a/b", "hub"),), length=8, cache=str(tmp_path))
    with pytest.raises(RecipeError, match=r"a/b .*403 .*org/file \(id 7\)") as caught:
        open_data(options, separating_tokenizer(), 61)
    assert "secret" not in str(caught.value)
