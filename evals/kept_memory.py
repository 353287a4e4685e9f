"""Memory that is freed stays with this process, for the next tensor: times of both sides then differ by what they do.

glibc gives large blocks back to the system and gets them anew, page by page. How many depends on what was allocated
before, whoever did it: up to a tenth of a training step, at one time of ours, at another of the rival's.
"""

import ctypes

MALLOC_SETTINGS = {"M_ARENA_MAX": (-8, 1), "M_MMAP_THRESHOLD": (-3, 2**25), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""By glibc's names: its number and ours, of which the second is the greatest that it takes."""


def keep_memory() -> None:
    """From here on; for a process that measures and ends. Other C libraries do as they do."""
    library = ctypes.CDLL(None)
    for setting in MALLOC_SETTINGS.values() if hasattr(library, "mallopt") else ():
        library.mallopt(*setting)
