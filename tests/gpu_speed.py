"""Times, memory and launches of our attention functions on a GPU, compared with their baselines.

Every case of `crosshead bench` with a target on a GPU, and all of `talking`, in turn with its baseline: as called,
which is the time of a loop of calls; and the cases of attention alone by the GPU's own clock once the work is queued,
which is the time of the kernels. `tests/gpu_check.py speed` runs this.
"""

import gc
import time
from dataclasses import replace
from typing import Any

import torch

from crosshead.evals.bench.case import TIME, Case, on_device
from crosshead.evals.bench.cases import ATTENTION, DECODE, MIXTURE, TALKING
from crosshead.evals.bench.machine import machine
from crosshead.evals.bench.pairs import Reading, Run, in_turn
from crosshead.evals.bench.run import bench_lines, measure_case
from crosshead.modeling.mechanisms.talking import HeadMaps
from random_calls import attend

ROUNDS = 5
MOST_SECONDS = 420
"""After which no further case begins."""
LONGER = 8192
LEAD = 20_000_000
"""Cycles that the GPU waits, so that work is handed over before it begins: some 10 ms."""


def cases() -> list[Case]:
    """Those with a target, mixture's at the greater length too, and talking's."""
    wanted = [case for case in (*ATTENTION, *DECODE) if "cuda" in case.targets]
    longer = [
        replace(
            case,
            name=case.name.replace("4096", str(LONGER)),
            description=case.description.replace("4096", str(LONGER)),
        )
        for case in wanted
        if case in MIXTURE and case.name.endswith("4096")
    ]
    longer = [replace(case, shape=dict(case.shape) | {"tokens": LONGER}) for case in longer]
    return list({case.name: case for case in (*wanted, *longer, *TALKING)}.values())


def by_the_gpu(run: Run) -> Reading:
    """A run's seconds by the GPU's clock; as long as the work is handed over sooner than it waits."""
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
    """A timed case of attention alone once more, by the GPU's clock."""
    with on_device("cuda"):
        ours, baseline = (by_the_gpu(side) for side in case.pair())
        figures = figures | in_turn(ours, baseline, rounds)
    target = figures["target"]
    return figures | {"met": None if target is None else figures["median_ratio"] <= target}


def launches() -> dict[str, int]:
    """Kernels that one layer of `talking` starts at batch 8, 32 heads, 2,048 tokens, forward and backward."""
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
    """Measure and print; the figures, and the cases that failed."""
    called: dict[str, Any] = {"device": "cuda", "cases": {}, "machine": machine()}
    by_its_clock: dict[str, Any] = {"device": "cuda, queued", "cases": {}, "machine": machine()}
    failed: list[str] = []
    start = time.monotonic()
    for case in cases():
        try:
            if time.monotonic() - start > MOST_SECONDS:
                raise TimeoutError("there was no time for it")
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
