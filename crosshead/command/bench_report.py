"""Runs the cases of a `crosshead bench` command, and writes and prints their report."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosshead_command.screen import progress

if TYPE_CHECKING:
    from crosshead.evals.bench.case import Case


def measure(
    name: str, known: Iterable["Case"], cases: list[str] | None, device: str, rounds: int, out: Path | None
) -> None:
    """Run the named cases, or all cases without names; write and print the report."""
    from crosshead.common.atomic_write import check_targets
    from crosshead.evals.bench.case import choose_cases
    from crosshead.evals.bench.machine import keep_memory
    from crosshead.evals.bench.run import bench, bench_lines

    chosen = choose_cases(list(known), cases or [], f"bench {name}")
    check_targets([out] if out else [], overwrite=True)
    keep_memory()
    with progress() as show:
        report = bench(chosen, rounds, device, show)
    write(report, bench_lines(report), out)


def write(report: dict[str, Any], lines: Iterable[str], out: Path | None) -> None:
    """Write the report to the JSON file `out`, if it is given, and print the table."""
    from crosshead.common.atomic_write import write_atomically

    if out is not None:
        write_atomically({out: json.dumps(report, indent=2) + "\n"})
    print(*lines, sep="\n")
