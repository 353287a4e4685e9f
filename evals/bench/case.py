"""A case: two implementations of the same work, ours and a baseline, at one shape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from crosshead.common.errors import EvalError, nearest

from .pairs import Run

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""Where it may be measured -> of what numbers."""
TIME, MEMORY, WHOLE_MEMORY, TOLD = "time", "memory", "whole memory", "told"
"""Of a run: its time; the bytes it adds at its peak to those held; those, and what it holds; what it returns."""


@dataclass(frozen=True)
class Case:
    """A row of a table."""

    name: str
    what: str
    """In words, as is the rival."""
    rival: str
    make: Callable[..., Run]
    """Makes one side ready, given whether it is ours, and the shape."""
    shape: Mapping[str, Any]
    targets: Mapping[str, float] = field(default_factory=dict)
    """The greatest ratio that is wanted, by device."""
    measured: str = TIME
    unit: str = "seconds"
    within_noise: bool = False
    """The target may lie within the spread."""
    dtype: str | None = None
    """Of the numbers, where it is not the device's."""
    work: int | None = None
    """Bytes that each side handles, where throughput is of interest."""

    def side(self, ours: bool) -> Run:
        """Ours or the rival, ready to run."""
        return self.make(ours, **self.shape)

    def pair(self) -> tuple[Run, Run]:
        """Ours and the rival."""
        return self.side(ours=True), self.side(ours=False)


def chosen(cases: Sequence[Case], names: Sequence[str], command: str) -> list[Case]:
    """The cases of these names, or all where there are none; `EvalError` where one is unknown."""
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            raise EvalError(f"{command} has no case {name!r} (its --help lists all){nearest(name, known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def check_device(device: str) -> None:
    """`EvalError` where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EvalError("--device cuda: no CUDA device is here; measure with --device cpu")


@contextmanager
def placed(device: str) -> Iterator[None]:
    """What is made lies on the device, in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[device])
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
