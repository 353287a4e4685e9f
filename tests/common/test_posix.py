import fcntl

import pytest

from crosshead.common.posix import lock_file


def test_lock_file_has_one_holder_at_a_time(tmp_path):
    path = tmp_path / "lock"
    with path.open("a") as first, path.open("a") as second:
        assert lock_file(first, tmp_path)
        with pytest.raises(BlockingIOError):
            lock_file(second, tmp_path)
        first.close()
        assert lock_file(second, tmp_path, wait=True)


@pytest.mark.parametrize("number", [22, 37, 38, 95], ids=["EINVAL", "ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_lock_on_unsupported_filesystem_warns(tmp_path, monkeypatch, caplog, number):
    def refused(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with (tmp_path / "lock").open("a") as file:
        assert not lock_file(file, tmp_path)
    assert f"{tmp_path} cannot be locked" in caplog.text
