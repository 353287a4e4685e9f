"""A benchmark case: two implementations of the same work, ours and a baseline, at one shape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from crosshead.common.errors import EvalError, nearest

from .pairs import Run

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""By device."""
SEED = 0
"""Of weights and inputs."""
TIME, MEMORY, TOTAL_MEMORY, RESULT = "time", "memory", "total memory", "result"
"""Values of `Case.measured`: the time of a run; the peak memory of a run beyond its inputs, or with them; the number
that the run returns."""


@dataclass(frozen=True)
class Case:
    """One line of a benchmark report."""

    name: str
    description: str
    baseline: str
    """The description of the baseline."""
    make: Callable[..., Run]
    """Prepares one side: called with `ours`, True or False, and the shape."""
    shape: Mapping[str, Any]
    targets: Mapping[str, float] = field(default_factory=dict)
    """The maximum ratio of ours to the baseline, by device."""
    measured: str = TIME
    unit: str = "seconds"
    within_noise: bool = False
    """The target is met if the lower quartile meets it; otherwise the median must."""
    dtype: str | None = None
    """The name of the dtype; None means the device's, from `DTYPES`."""
    work: int | None = None
    """Bytes that each side processes, for a throughput."""

    def side(self, ours: bool) -> Run:
        """Ours or the baseline, ready to run."""
        return self.make(ours, **self.shape)

    def pair(self) -> tuple[Run, Run]:
        """Ours and the baseline."""
        return self.side(ours=True), self.side(ours=False)

    @property
    def measures_memory(self) -> bool:
        """True if peak memory is measured."""
        return self.measured in (MEMORY, TOTAL_MEMORY)


def choose_cases(cases: Sequence[Case], names: Sequence[str], command: str) -> list[Case]:
    """The cases with these names, or all cases if there are no names; `EvalError` for an unknown name."""
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            raise EvalError(f"{command} has no case {name!r} (its --help lists all){nearest(name, known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """New tensors are created on this device, in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[device])
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
