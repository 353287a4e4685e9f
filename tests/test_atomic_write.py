"""Atomic file writes: a symlink stays a symlink, and only regular files are replaced."""

import os

import pytest

from crosshead.common.atomic_write import check_targets, write_atomically
from crosshead.common.errors import EvalError


def test_symlink_is_kept_and_its_target_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "a.json")
    write_atomically({tmp_path / "link.json": "new", tmp_path / "b.json": "second"})
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "a.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["a.json", "b.json", "link.json"]


def test_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EvalError, match="pipe is not a regular file"):
        check_targets([tmp_path / "pipe"], overwrite=True)
