"""Runs benchmark cases, ours and the baseline in turn, and formats the report as a table."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from crosshead.common.errors import EvalError
from crosshead.common.progress import Counter, Progress, silent
from crosshead.common.torch_state import check_device

from .case import DTYPES, TIME, Case, on_device
from .machine import machine
from .memory import peak_bytes
from .pairs import Reading, measure_alternating, timed

MAXIMUM_MEMORY_ROUNDS = 3
"""Maximum number of rounds of a memory measurement, since memory hardly differs between runs."""
UNITS = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
}
"""Unit -> sizes and names of its multiples, the largest first."""


def bench(cases: Sequence[Case], rounds: int, device: str = "cpu", progress: Progress = silent) -> dict[str, Any]:
    """Run the cases and return their figures and the machine; the progress counts rounds."""
    check_device(device, EvalError)
    counts = [min(rounds, MAXIMUM_MEMORY_ROUNDS) if case.measures_memory else rounds for case in cases]
    counter, start = Counter(progress, "measuring", sum(counts)), time.perf_counter()
    results = {}
    for case, count in zip(cases, counts, strict=True):
        counter.add(0, case.name)
        results[case.name] = measure_case(case, count, device, partial(counter.add, 1, case.name))
        gc.collect()  # models contain reference cycles
    seconds = time.perf_counter() - start
    return {"device": device, "cases": results, "machine": machine(), "took_seconds": round(seconds, 1)}


def measure_case(case: Case, rounds: int, device: str, advance: Callable[[], object]) -> dict[str, Any]:
    """Return the description of a case, the readings of both sides, their ratios, and whether the target is met."""
    figures = measure_alternating(*_readings(case, device), rounds, advance)
    if case.work is not None:
        figures["bytes_per_second"] = [case.work / figures[f"median_{side}"] for side in ("ours", "baseline")]
    target = case.targets.get(device)
    ratio = figures["quartile_ratios"][0] if case.within_noise else figures["median_ratio"]
    return {
        "what": case.description,
        "compared_with": case.baseline,
        "shape": dict(case.shape),
        "unit": case.unit,
        "rounds": rounds,
        "dtype": case.dtype or str(DTYPES[device]).removeprefix("torch."),
        **figures,
        "target": target,
        "within_noise": case.within_noise,
        "met": None if target is None else ratio <= target,
    }


def _readings(case: Case, device: str) -> tuple[Reading, Reading]:
    """Return the readings of ours and the baseline; both sides are built on the device before either runs."""
    if case.measures_memory:
        return partial(peak_bytes, case, True, device), partial(peak_bytes, case, False, device)
    with on_device(device):
        sides: Any = case.pair()
    return (timed(sides[0]), timed(sides[1])) if case.measured == TIME else sides


def bench_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as a table."""
    width = max(map(len, report["cases"]))
    yield f"{report['device']:{width}}  {'ours':>9}  {'baseline':>9}  {'ratio':>6}  {'quartiles':15}  target"
    for name, result in report["cases"].items():
        sides = "  ".join(f"{amount(result[f'median_{side}'], result['unit']):>9}" for side in ("ours", "baseline"))
        yield f"{name:{width}}  {sides}  {result['median_ratio']:>6.3f}  {spread(result):15}  {verdict(result)}"


def spread(result: Mapping[str, Any]) -> str:
    """Format the quartiles of the ratios."""
    return " to ".join(f"{ratio:.3f}" for ratio in result["quartile_ratios"])


def verdict(result: Mapping[str, Any]) -> str:
    """Format the target, and whether it is met."""
    if result["target"] is None:
        return "none"
    noise = " within noise" * result["within_noise"]
    return f"{result['target']:.3g}{noise}, {'met' if result['met'] else 'missed'}"


def amount(value: float, unit: str) -> str:
    """Format seconds or bytes with a prefix of the unit."""
    size, word = next((each for each in UNITS[unit] if abs(value) >= each[0]), UNITS[unit][-1])
    return f"{value / size:.3g} {word}"
