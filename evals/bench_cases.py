"""What `crosshead bench attention`, `crosshead bench decode` and `crosshead bench compiled` measure."""

from . import bench_compiled, bench_explicit, bench_host, bench_mixture, bench_models, bench_talking
from .bench_case import Case

ATTENTION: tuple[Case, ...] = (*bench_mixture.CASES, *bench_talking.CASES, *bench_models.CASES)
DECODE: tuple[Case, ...] = (*bench_explicit.CASES, *bench_host.CASES)
COMPILED: tuple[Case, ...] = bench_compiled.CASES
