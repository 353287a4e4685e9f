"""The machine and settings of a measurement."""

import ctypes
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("crosshead", "torch", "transformers", "accelerate", "triton")


def machine() -> dict[str, Any]:
    """Processor and what of it torch uses, accelerator, threads and versions, for a report."""
    accelerator = None
    if torch.accelerator.is_available():
        accelerator = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())
        )
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
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Its name, where the system tells."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


MALLOC_SETTINGS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_THRESHOLD": (-3, 2**25), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""By glibc's names: its number and ours, of which the second is the greatest that it takes."""
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch reads it as it makes its first tensor."""


def keep_memory() -> None:
    """From here on; for a process that measures and ends. Other C libraries and systems do as they do."""
    library = ctypes.CDLL(None)
    for setting in MALLOC_SETTINGS.values() if hasattr(library, "mallopt") else ():
        library.mallopt(*setting)
    _use_large_pages()


def _use_large_pages() -> None:
    """For this process alone: in those whose memory is measured, large pages would be counted whole."""
    import torch

    before = os.environ.get(LARGE_PAGES)
    os.environ[LARGE_PAGES] = "1"
    torch.empty(1)
    if before is None:
        del os.environ[LARGE_PAGES]
    else:
        os.environ[LARGE_PAGES] = before
