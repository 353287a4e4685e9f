"""What the commands of `crosshead bench` share: cases are chosen and measured, and what came out is told."""

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
    """Of the known cases, the named ones or all: measured, written and told."""
    from crosshead.evals.bench.case import choose_cases
    from crosshead.evals.bench.machine import keep_memory
    from crosshead.evals.bench.run import bench

    wanted = choose_cases(list(known), cases or [], f"bench {name}")
    check(out)
    keep_memory()
    with progress() as show:
        report = bench(wanted, rounds, device, show)
    tell(report, out)


def check(out: Path | None) -> None:
    """Nothing is measured that could not be written."""
    from crosshead.common.atomic_write import check_targets

    check_targets([] if out is None else [out], overwrite=True)


def tell(report: dict[str, Any], out: Path | None) -> None:
    """Write what is asked for, and print a table."""
    from crosshead.evals.bench.run import bench_lines

    write(report, out)
    print_lines(bench_lines(report))


def write(report: dict[str, Any], out: Path | None) -> None:
    """Where it is asked for."""
    from crosshead.common.atomic_write import write_whole

    if out is not None:
        write_whole({out: json.dumps(report, indent=2) + "\n"})


def print_lines(lines: Iterable[str]) -> None:
    """To standard output."""
    for line in lines:
        print(line)
