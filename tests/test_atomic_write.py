"""Atomic file writes: a symlink stays a symlink, only regular files are replaced, and errors are `EvalError`s."""

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


def test_broken_link_is_refused_before_the_computation(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "none.json")
    with pytest.raises(EvalError, match=r"link\.json is a broken link"):
        check_targets([tmp_path / "link.json"], overwrite=True)


def test_too_long_partial_name_is_refused(tmp_path):
    path = tmp_path / ("a" * 250)  # valid, but not with the ending of the temporary name
    with pytest.raises(EvalError, match=r"a{250} cannot be written"):
        write_atomically({path: "new"})
    assert list(tmp_path.iterdir()) == []
