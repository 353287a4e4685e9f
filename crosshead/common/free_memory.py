"""The memory that this process can still allocate: free memory within the limits of its cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

CPU = torch.device("cpu")
MEMORY_INFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
ROOM = 1.25
"""Memory to load and run a whole model, as a multiple of the bytes of its weights."""
# cgroup version -> subfolder, file with the limit, file with the usage, prefix of the keys in memory.stat.
_FILES = {
    "v2": ("", "memory.max", "memory.current", ""),
    "v1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def available_memory() -> int:
    """Bytes that can be allocated now; without /proc/meminfo (macOS), half of all memory."""
    if not MEMORY_INFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in MEMORY_INFO.read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_groups()])


def fits_in_memory(size: int, device: torch.device = CPU) -> bool:
    """True if a model with `size` bytes of weights can be loaded and run in the free memory of the device."""
    free = available_memory() if device.type == "cpu" else torch.accelerator.get_memory_info(device)[0]
    return size * ROOM <= free


def _left_in_groups() -> Iterator[int]:
    """Bytes left below the memory limit, for each cgroup of this process and its parents."""
    for version, path in _own_groups():
        mount, limit, used, prefix = _FILES[version]
        root = GROUPS / mount
        # In a container, the path may name a folder of the host, or a parent of the mounted cgroups.
        own = root if ".." in path.split("/") else root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root) and (group / limit).exists():
                yield from _left(group / limit, group / used, group / "memory.stat", prefix)


def _own_groups() -> Iterator[tuple[str, str]]:
    """Version and path of each cgroup of this process that accounts for memory."""
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield ("v1" if controllers else "v2"), path


def _left(limit: Path, used: Path, statistics: Path, prefix: str) -> Iterator[int]:
    """Bytes left in one cgroup; nothing if it has no limit."""
    if limit.read_text().strip() == "max":
        return
    parts = dict(line.split() for line in statistics.read_text().splitlines())
    # The page cache is freed on demand. The key "file" would include tmpfs, which is not freed.
    files = sum(int(parts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    yield int(limit.read_text()) - int(used.read_text()) + files
