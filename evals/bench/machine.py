"""Describes the machine of a measurement for the report, and sets the allocator of a process that measures."""

import ctypes
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("crosshead", "torch", "transformers", "accelerate", "triton")
MALLOC_SETTINGS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_THRESHOLD": (-3, 2**25), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""Name in glibc -> number of the mallopt parameter and its value (M_MMAP_THRESHOLD: the largest allowed value)."""
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Environment variable for huge pages, which torch reads when it creates the first tensor."""


def machine() -> dict[str, Any]:
    """Return processor, instruction set, accelerator, number of threads and versions."""
    device = torch.accelerator.current_accelerator(check_available=True)
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else device and str(device)
    return {
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": accelerator,
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's model name where Linux reports one, else the name in `platform`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def keep_memory() -> None:
    """Keep freed memory in this process until it ends (glibc only), and let torch allocate huge pages."""
    library = ctypes.CDLL(None)
    for setting in MALLOC_SETTINGS.values() if hasattr(library, "mallopt") else ():
        library.mallopt(*setting)
    before = os.environ.get(LARGE_PAGES)
    os.environ[LARGE_PAGES] = "1"
    torch.empty(1)
    # Child processes must not inherit the setting: they measure their memory, where a huge page counts as a whole.
    del os.environ[LARGE_PAGES]
    if before is not None:
        os.environ[LARGE_PAGES] = before
