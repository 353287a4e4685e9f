"""The kernels on a GPU: that they are exact, then what they take beside their rivals.

usage: CROSSHEAD_TRITON=1 python tests/gpu_speed.py OUT.json [ROUNDS [CALLS]]

Random calls (500 of each mechanism in float32 and in bfloat16, unless told otherwise) are compared with the plain
computation in float64: outputs and, but for `mixture`'s decoding, gradients. Then every case of `crosshead bench
attention` and `decode` with a target on a GPU, and all of `talking`, are measured in turn with their rivals: as
called, which is what a loop of calls takes; and those of attention alone by the GPU's own clock once the work has been
handed over, which is what the kernels take. Prints tables, writes all figures, and exits with 1 where a call differs,
or where the kernels cannot be asked for; without a GPU it says so and exits with 0.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crosshead.evals.bench_case import TIME, Case, placed
from crosshead.evals.bench_cases import ATTENTION, DECODE
from crosshead.evals.bench_mixture import CASES as MIXTURE
from crosshead.evals.bench_pairs import Reading, Run, in_turn
from crosshead.evals.bench_run import bench, bench_lines
from crosshead.evals.bench_talking import CASES as TALKING
from crosshead.modeling.where_triton_runs import runs_triton
from random_calls import checks

ROUNDS, CALLS = 20, 500
LONGEST = 700
"""Of the random calls."""
LONGER = 8192
LEAD = 20_000_000
"""Cycles that the GPU waits, so that work is handed over before it begins: some 10 ms."""


def cases() -> list[Case]:
    """Those with a target, mixture's at the greater length too, and talking's."""
    wanted = [case for case in (*ATTENTION, *DECODE) if "cuda" in case.targets]
    longer = [
        replace(case, name=case.name.replace("4096", str(LONGER)), what=case.what.replace("4096", str(LONGER)))
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


def queued(report: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The timed cases of attention alone once more, by the GPU's clock."""
    found = {}
    for case in cases():
        if case.measured == TIME and "hidden_size" not in case.shape:
            with placed("cuda"):
                ours, rival = (by_the_gpu(side) for side in case.pair())
                figures = report["cases"][case.name] | in_turn(ours, rival, rounds)
            target = figures["target"]
            found[case.name] = figures | {"met": None if target is None else figures["median_ratio"] <= target}
    return {"device": "cuda, queued", "cases": found, "machine": report["machine"]}


def main(out: Path, rounds: int = ROUNDS, calls: int = CALLS) -> int:
    """Check, measure, print and write."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing checked")
        return 0
    if not runs_triton(torch.zeros(1, device="cuda")):
        print("the kernels cannot be asked for: install triton, and set CROSSHEAD_TRITON=1")
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for name, worst, holds in checks("cuda", LONGEST, calls):
        print(f"{name:20} {worst:.2e} {'ok' if holds else 'DIFFERS'}", flush=True)
        found.append({"name": name, "calls": calls, "worst": worst, "holds": holds})
    called = bench(cases(), rounds, "cuda")
    by_its_clock = queued(called, rounds)
    for report in (called, by_its_clock):
        print("", *bench_lines(report), sep="\n", flush=True)
    report = {"checks": found, "called": called, "queued": by_its_clock}
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(check["holds"] for check in found) else 1


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
