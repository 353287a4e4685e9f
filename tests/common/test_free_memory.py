"""Free memory within the limits of cgroups v1 and v2, which may be set for any parent group of the process."""

import os

import pytest

from crosshead.common import free_memory
from crosshead.common.free_memory import available_memory

MIB = 1 << 20
V2, V1 = "0::/user/job\n", "12:cpu,cpuacct:/\n5:memory:/user/job\n0::/user/job\n"


@pytest.fixture
def fake_system(tmp_path, monkeypatch):
    """A fake system with 1 GiB of free memory and without limits."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {1 << 20} kB\n")
    (tmp_path / "groups").mkdir()
    monkeypatch.setattr(free_memory, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def write_cgroup(group, limit, used=60, files=40, version="v2"):
    """Write the files of a cgroup; `limit`, `used` and `files` (page cache) are in MiB."""
    names = ("memory.max", "memory.current") if version == "v2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text("max\n" if limit is None else f"{limit * MIB}\n")
    (group / names[1]).write_text(f"{used * MIB}\n")
    prefix = "" if version == "v2" else "total_"
    statistics = {"anon": used - files, "file": 999, "active_file": files // 4, "inactive_file": files - files // 4}
    (group / "memory.stat").write_text("".join(f"{prefix}{key} {value * MIB}\n" for key, value in statistics.items()))


def test_available_memory_without_cgroup_limits(fake_system):
    assert available_memory() == 1 << 30
    (fake_system / "own").write_text(V2)
    write_cgroup(fake_system / "groups" / "user" / "job", None)
    assert available_memory() == 1 << 30


@pytest.mark.parametrize("group", ["", "user", "user/job"])
@pytest.mark.parametrize("version", ["v2", "v1"])
def test_limit_of_any_parent_cgroup_applies(group, version, fake_system):
    (fake_system / "own").write_text(V2 if version == "v2" else V1)
    root = fake_system / "groups" / ("memory" if version == "v1" else "")
    write_cgroup(root / group, 80, version=version)
    assert available_memory() == (80 - 60 + 40) * MIB


def test_lowest_cgroup_limit_applies(fake_system):
    (fake_system / "own").write_text(V2)
    for group, limit in (("", 900), ("user", 90), ("user/job", 300), ("user/other", 61), ("user/job/below", 61)):
        write_cgroup(fake_system / "groups" / group, limit)
    assert available_memory() == (90 - 60 + 40) * MIB


def test_cgroup_path_of_host_falls_back_to_mounted_root(fake_system):
    (fake_system / "own").write_text("5:memory:/docker/0123\n")
    write_cgroup(fake_system / "groups" / "memory", 70, version="v1")
    assert available_memory() == 50 * MIB


def test_cgroup_path_outside_mount_is_not_read(fake_system):
    (fake_system / "own").write_text("0::/../elsewhere\n")
    write_cgroup(fake_system / "groups" / "..", 61)
    write_cgroup(fake_system / "groups", 70)
    assert available_memory() == 50 * MIB


def test_available_memory_is_at_most_physical_memory():
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
