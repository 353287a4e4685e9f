"""Cases measured one after the other, ours and the rival in turn, and what came out as a report and as a table."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from .case import DTYPES, MEMORY, TIME, WHOLE_MEMORY, Case, check_device, placed
from .machine import machine
from .memory import peak_bytes
from .pairs import Reading, in_turn, timed

FEW_ROUNDS = 3
"""Of memory, which hardly differs from run to run, at most."""
UNITS = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
}
Progress = Callable[[str, int, int, str], object]
"""Told the stage, how much of it is done, how much there is, and which case it is at."""


def silent(stage: str, done: int, total: int, told: str) -> None:
    """For nobody."""


def bench(cases: Sequence[Case], rounds: int, device: str = "cpu", progress: Progress = silent) -> dict[str, Any]:
    """The figures of each case, by its name, and the machine."""
    check_device(device)
    counts = [_rounds(case, rounds) for case in cases]
    done, total, start = 0, sum(counts), time.perf_counter()
    found = {}
    for case, count in zip(cases, counts, strict=True):

        def advance(case: Case = case) -> None:
            nonlocal done
            done += 1
            progress("measuring", done, total, case.name)

        progress("measuring", done, total, case.name)
        found[case.name] = measured(case, count, device, advance)
        gc.collect()  # a model's parts refer to each other
    took = time.perf_counter() - start
    return {"device": device, "cases": found, "machine": machine(), "took_seconds": round(took, 1)}


def measured(case: Case, rounds: int, device: str, advance: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """One case: what it is, the runs of both sides, their ratios, and whether the target is met."""
    ours, rival = _readings(case, device)
    figures = in_turn(ours, rival, rounds, advance)
    target = case.targets.get(device)
    least = figures["quartile_ratios"][0] if case.within_noise else figures["median_ratio"]
    about = {"what": case.what, "beside": case.rival, "shape": dict(case.shape), "unit": case.unit, "rounds": rounds}
    about["dtype"] = case.dtype or str(DTYPES[device]).removeprefix("torch.")
    if case.work is not None:
        figures["bytes_per_second"] = [case.work / figures[f"median_{side}"] for side in ("ours", "rival")]
    verdict = {"target": target, "within_noise": case.within_noise, "met": None if target is None else least <= target}
    return about | figures | verdict


def _rounds(case: Case, rounds: int) -> int:
    return min(rounds, FEW_ROUNDS) if case.measured in (MEMORY, WHOLE_MEMORY) else rounds


def _readings(case: Case, device: str) -> list[Reading]:
    """Of ours and of the rival. Both are made before either runs, and run where no default device stands."""
    if case.measured in (MEMORY, WHOLE_MEMORY):
        return [partial(_memory, case, ours, device) for ours in (True, False)]
    with placed(device):
        sides = case.pair()
    return [timed(run) if case.measured == TIME else partial(_told, run) for run in sides]


def _memory(case: Case, ours: bool, device: str) -> float:
    with placed(device):
        return peak_bytes(case, ours, device)


def _told(run: Callable[[], Any]) -> float:
    return float(run())


def bench_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures as a table."""
    width = max(map(len, report["cases"]))
    yield f"{report['device']:{width}}  {'ours':>9}  {'rival':>9}  {'ratio':>6}  {'quartiles':15}  target"
    for name, found in report["cases"].items():
        sides = "  ".join(f"{amount(found[f'median_{side}'], found['unit']):>9}" for side in ("ours", "rival"))
        yield f"{name:{width}}  {sides}  {found['median_ratio']:>6.3f}  {spread(found):15}  {verdict(found)}"


def spread(found: Mapping[str, Any]) -> str:
    """The quartiles of the ratios."""
    return " to ".join(f"{ratio:.3f}" for ratio in found["quartile_ratios"])


def verdict(found: Mapping[str, Any]) -> str:
    """The target, and whether it is met."""
    if found["target"] is None:
        return "none"
    noise = " within noise" * found["within_noise"]
    return f"{found['target']:.3g}{noise}, {'met' if found['met'] else 'missed'}"


def amount(value: float, unit: str) -> str:
    """Seconds or bytes, as people write them."""
    size, word = next((each for each in UNITS[unit] if abs(value) >= each[0]), UNITS[unit][-1])
    return f"{value / size:.3g} {word}"
