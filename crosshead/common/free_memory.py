"""The memory that this process may still allocate: free memory within the limits of its control groups."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

CPU = torch.device("cpu")
MEMORY_INFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
ROOM = 1.25
"""Memory to load and run a whole model, as a multiple of its float32 weights."""
# Version of control groups -> subfolder, file of the limit, file of the usage, prefix in the statistics.
_FILES = {
    "v2": ("", "memory.max", "memory.current", ""),
    "v1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def available_memory() -> int:
    """Bytes that can be allocated now; half of all memory where the system does not report free memory."""
    if not MEMORY_INFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in MEMORY_INFO.read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_groups()])


def fits_in_memory(size: int, device: torch.device = CPU) -> bool:
    """Whether a model with `size` bytes of weights can be loaded and run in the free memory of a device."""
    free = available_memory() if device.type == "cpu" else torch.accelerator.get_memory_info(device)[0]
    return size * ROOM <= free


def _left_in_groups() -> Iterator[int]:
    """The bytes left under the limit of each control group of this process."""
    for version, path in _own_groups():
        mount, limit, used, prefix = _FILES[version]
        root = GROUPS / mount
        # Within a container the path may name a folder of the host, or a parent of the mounted groups.
        own = root if ".." in path.split("/") else root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root) and (group / limit).exists():
                yield from _left(group / limit, group / used, group / "memory.stat", prefix)


def _own_groups() -> Iterator[tuple[str, str]]:
    """The control groups of this process that account for memory: the version and the path."""
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield ("v1" if controllers else "v2"), path


def _left(limit: Path, used: Path, statistics: Path, prefix: str) -> Iterator[int]:
    if limit.read_text().strip() == "max":
        return
    parts = dict(line.split() for line in statistics.read_text().splitlines())
    # The page cache is freed on demand; tmpfs, which "file" would include, is not.
    files = sum(int(parts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    yield int(limit.read_text()) - int(used.read_text()) + files
