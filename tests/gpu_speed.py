"""Times, memory and kernel launches of crosshead's attention functions on a GPU, compared with their baselines.

Measures every case of `crosshead bench` that has a target on a GPU, and all cases of `talking`, alternating with the
baseline: as called (the time of a loop of calls, launches included), and for cases of attention alone also the time
of the queued kernels by the GPU's clock. `tests/gpu_check.py speed` runs this.
"""

import gc
import time
from dataclasses import replace
from typing import Any

import torch

from crosshead.evals.bench.case import TIME, Case, on_device
from crosshead.evals.bench.cases import ATTENTION, DECODE, MIXTURE, TALKING
from crosshead.evals.bench.machine import machine
from crosshead.evals.bench.pairs import Reading, Run, measure_alternating
from crosshead.evals.bench.run import bench_lines, measure_case
from crosshead.modeling.mechanisms.talking import HeadMaps
from random_calls import attend

ROUNDS = 5
MOST_SECONDS = 420
"""Time limit in seconds, after which no further case is started."""
LONGER = 8192
LEAD = 20_000_000
"""Cycles that the GPU sleeps (about 10 ms), so that all kernels are queued before the first one starts."""


def cases() -> list[Case]:
    """Return the cases with a target on a GPU, `mixture` also at the longer length, and all cases of `talking`."""
    with_target = [case for case in (*ATTENTION, *DECODE) if "cuda" in case.targets]
    longer = [
        replace(
            case,
            name=case.name.replace("4096", str(LONGER)),
            description=case.description.replace("4096", str(LONGER)),
        )
        for case in with_target
        if case in MIXTURE and case.name.endswith("4096")
    ]
    longer = [replace(case, shape=dict(case.shape) | {"tokens": LONGER}) for case in longer]
    return list({case.name: case for case in (*with_target, *longer, *TALKING)}.values())


def by_the_gpu(run: Run) -> Reading:
    """Return a reading of a run's seconds by CUDA events; valid if the run is queued while the GPU sleeps."""
    run()

    def read() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(LEAD)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def queued(figures: dict[str, Any], case: Case, rounds: int) -> dict[str, Any]:
    """Measure a case of attention alone again by the GPU's clock; return the updated figures."""
    with on_device("cuda"):
        ours, baseline = (by_the_gpu(side) for side in case.pair())
        figures = figures | measure_alternating(ours, baseline, rounds)
    target = figures["target"]
    return figures | {"met": None if target is None else figures["median_ratio"] <= target}


def launches() -> dict[str, int]:
    """Return the kernel launches of one `talking` layer, batch 8, 32 heads, 2,048 tokens, forward and backward."""
    heads = [torch.randn(8, 32, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    maps = [torch.eye(32, device="cuda")[None, None].requires_grad_() for _ in range(2)]
    head_maps = HeadMaps(maps[0], None, maps[1], None)
    counts = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as forward:
        output = attend("crosshead_talking", *heads, None, head_maps=head_maps)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as backward:
        output.sum().backward()
        torch.cuda.synchronize()
    for name, profile in (("forward", forward), ("backward", backward)):
        counts[name] = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return counts


def speed(rounds: int = ROUNDS) -> tuple[dict[str, Any], list[str]]:
    """Measure all cases and print them; return the figures, and the cases that failed."""
    called: dict[str, Any] = {"device": "cuda", "cases": {}, "machine": machine()}
    by_its_clock: dict[str, Any] = {"device": "cuda, queued", "cases": {}, "machine": machine()}
    failed: list[str] = []
    start = time.monotonic()
    for case in cases():
        try:
            if time.monotonic() - start > MOST_SECONDS:
                raise TimeoutError("not run: time limit reached")
            figures = called["cases"][case.name] = measure_case(case, rounds, "cuda", lambda: None)
            if case.measured == TIME and "hidden_size" not in case.shape:
                by_its_clock["cases"][case.name] = queued(figures, case, rounds)
        except Exception as error:
            failed.append(f"{case.name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        print(
            case.name,
            *(
                f"{part['cases'][case.name]['median_ratio']:.3f}"
                for part in (called, by_its_clock)
                if case.name in part["cases"]
            ),
            flush=True,
        )
        gc.collect()  # models contain reference cycles
    for report in (called, by_its_clock):
        print("", *bench_lines(report), sep="\n", flush=True)
    counts = launches()
    print(f"launches of a layer of talking, batch 8, 32 heads, 2,048 tokens: {counts}", flush=True)
    return {"called": called, "queued": by_its_clock, "launches": counts}, failed
