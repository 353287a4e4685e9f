"""Shared by the commands of `crosshead bench`: run cases, write and print the report."""

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
    """Run the named cases, or all cases; write and print the report."""
    from crosshead.evals.bench.case import choose_cases
    from crosshead.evals.bench.machine import keep_memory
    from crosshead.evals.bench.run import bench

    chosen = choose_cases(list(known), cases or [], f"bench {name}")
    check(out)
    keep_memory()
    with progress() as show:
        report = bench(chosen, rounds, device, show)
    write_and_print(report, out)


def check(out: Path | None) -> None:
    """Check the output file before the measurement."""
    from crosshead.common.atomic_write import check_targets

    check_targets([] if out is None else [out], overwrite=True)


def write_and_print(report: dict[str, Any], out: Path | None) -> None:
    """Write the JSON file, if there is one, and print a table."""
    from crosshead.evals.bench.run import bench_lines

    write(report, out)
    print_lines(bench_lines(report))


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write the JSON file, if there is one."""
    from crosshead.common.atomic_write import write_whole

    if out is not None:
        write_whole({out: json.dumps(report, indent=2) + "\n"})


def print_lines(lines: Iterable[str]) -> None:
    """Print to standard output."""
    for line in lines:
        print(line)
