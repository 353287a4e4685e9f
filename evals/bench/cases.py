"""The cases of `crosshead bench attention`, `crosshead bench decode` and `crosshead bench compiled`."""

from . import compiled as bench_compiled
from . import explicit as bench_explicit
from . import host as bench_host
from . import mixture as bench_mixture
from . import models as bench_models
from . import talking as bench_talking
from .case import Case

ATTENTION: tuple[Case, ...] = (*bench_mixture.CASES, *bench_talking.CASES, *bench_models.CASES)
DECODE: tuple[Case, ...] = (*bench_explicit.CASES, *bench_host.CASES)
COMPILED: tuple[Case, ...] = bench_compiled.CASES
