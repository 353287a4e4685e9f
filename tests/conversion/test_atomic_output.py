import fcntl
import os
import re
from collections import namedtuple

import pytest

from crosshead.common.errors import ConversionError
from crosshead.conversion.writing import atomic_output as module
from crosshead.conversion.writing.atomic_output import atomic_output, check_apart
from output_toys import ONE, SHARDS, TWO, complete, names, refusal, run, stopped, write


def test_publish_leaves_only_target(tmp_path):
    assert run(tmp_path / "out") == list(SHARDS)
    assert complete(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_target_is_absent_until_publish(tmp_path):
    with atomic_output(tmp_path / "out", ONE, False) as output:
        write(output)
        assert not (tmp_path / "out").exists()
        assert names(tmp_path) == [".out.crosshead-partial"]
        output.publish()
        assert complete(tmp_path / "out")


def test_output_without_publish_leaves_no_files(tmp_path):
    with atomic_output(tmp_path / "a" / "b" / "out", ONE, False) as output:
        write(output)
    assert names(tmp_path) == []


def test_parent_folders_are_created(tmp_path):
    run(tmp_path / "a" / "b" / "out")
    assert complete(tmp_path / "a" / "b" / "out")


def test_concurrent_run_for_same_target_is_refused(tmp_path):
    with atomic_output(tmp_path / "out", ONE, False) as output:
        write(output)
        assert str(tmp_path / "out") in refusal(tmp_path / "out")
        assert str(tmp_path / "out") in refusal(tmp_path / "out", identity=TWO, restart=True)
        output.publish()
    assert complete(tmp_path / "out")


def test_disk_without_file_locks_is_logged_and_written(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    run(tmp_path / "out")
    assert complete(tmp_path / "out") and names(tmp_path) == ["out"]
    assert "cannot be locked" in caplog.text


def test_output_larger_than_free_space_is_refused(tmp_path, monkeypatch):
    free = 600
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(10**6, 10**6 - free, free))
    assert re.search(r"needs 1.03 KiB, but its disk has 600 bytes free", refusal(tmp_path / "out"))
    with (
        pytest.raises(ConversionError, match=r"needs 601 bytes, .* 600 bytes free"),
        atomic_output(tmp_path / "out", ONE, False) as output,
    ):
        output.check_space(601, 0)
    with (
        pytest.raises(ConversionError, match=r"needs 601 bytes, .* 600 bytes free"),
        atomic_output(tmp_path / "out", ONE, False) as output,
    ):
        output.check_space(400, 201)
    with pytest.raises(KeyError), atomic_output(tmp_path / "out", ONE, False) as output:
        (output.work / "seen.safetensors").write_bytes(bytes(50))
        output.check_space(400, 250)  # 50 bytes are written already
        raise KeyError
    assert names(tmp_path / ".out.crosshead-partial") == ["journal.json", "lock", "model", "seen.safetensors"]
    free = 10**6
    stopped(tmp_path / "out", stop=3)
    free = 300
    assert run(tmp_path / "out") == list(SHARDS)[3:]


def test_unwritable_target_paths_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "File exists" in refusal(tmp_path / "file" / "out")
    assert "too long" in refusal(tmp_path / ("x" * 250))
    assert "contains the folder" in refusal(tmp_path.__class__("/"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_parent_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path / "out")


def test_target_overlapping_source_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("source")
    source = tmp_path / "source"
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "away").symlink_to("elsewhere/deep")
    targets = [source, source / "out", tmp_path, tmp_path / "link", tmp_path / "link/a"]
    targets += [tmp_path / "elsewhere" / ".." / "source", tmp_path / "away" / ".." / "source"]
    for target in targets:
        with pytest.raises(ConversionError, match=re.escape(str(source))):
            check_apart([source], target)
    check_apart([source], tmp_path / "source2")
