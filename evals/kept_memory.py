"""Memory as it should be where times are compared: what differs between both sides is then what they do.

glibc gives large blocks back to the system and gets them anew, page by page. How many depends on what was allocated
before, whoever did it: up to a tenth of a training step, at one time of ours, at another of the rival's. So what is
freed stays with this process. And weights of the same size, in pages of 4 kB wherever there were some, took one side
up to a seventh longer to read than the other. So tensors lie in large pages, where the system has them.
"""

import ctypes
import os

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
