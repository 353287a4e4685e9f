"""A benchmark case: two implementations of the same work, ours and a baseline, at one shape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from crosshead.common.errors import EvalError, nearest

from .pairs import Run

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""Device -> dtype of weights and inputs."""
SEED = 0
"""Seed of random weights and inputs."""
TIME, MEMORY, TOTAL_MEMORY, RESULT = "time", "memory", "total memory", "result"
"""Values of `Case.measured`: the time of a run; its peak memory without or with inputs; the number it returns."""


@dataclass(frozen=True)
class Case:
    """A benchmark case, which is one line of the report."""

    name: str
    description: str
    baseline: str
    """Description of the baseline."""
    make: Callable[..., Run]
    """Builds ours or the baseline: called with `ours`, True or False, and the shape as keywords."""
    shape: Mapping[str, Any]
    targets: Mapping[str, float] = field(default_factory=dict)
    """Device -> maximum ratio of ours to the baseline."""
    measured: str = TIME
    unit: str = "seconds"
    within_noise: bool = False
    """True if the lower quartile of the ratios must meet the target, False if their median must."""
    dtype: str | None = None
    """Name of the dtype; None means the device's dtype in `DTYPES`."""
    work: int | None = None
    """Number of bytes that each side processes, for a throughput; None reports no throughput."""

    def side(self, ours: bool) -> Run:
        """Build ours or the baseline."""
        return self.make(ours, **self.shape)

    def pair(self) -> tuple[Run, Run]:
        """Build ours and the baseline."""
        return self.side(ours=True), self.side(ours=False)

    @property
    def measures_memory(self) -> bool:
        """True if peak memory is measured."""
        return self.measured in (MEMORY, TOTAL_MEMORY)


def choose_cases(cases: Sequence[Case], names: Sequence[str], command: str) -> list[Case]:
    """Return the cases with these names, or all cases if there are no names; `EvalError` for an unknown name."""
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            raise EvalError(f"{command} has no case {name!r} (its --help lists all){nearest(name, known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Create new tensors on this device, in its dtype, within the block."""
    with torch.device(device), ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(DTYPES[device])
        yield
