"""What the user sees while a command works, and at its end."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

UNITS = {"writing": "bytes", "checking": "bytes"}
"""What a stage counts, where that is not layers."""


class Progress(Protocol):
    """Told the stage, how much of it is done, and how much there is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show it."""


@contextmanager
def progress() -> Iterator[Progress]:
    """Bars on stderr, one a stage, with bytes or layers and the time left; nothing where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    label, bar = TextColumn("{task.description:<12}"), BarColumn()
    left = TimeRemainingColumn(elapsed_when_finished=True)
    current: list[tuple[str, Bars, Any]] = []

    def show(stage: str, done: int, total: int) -> None:
        if not current or current[0][0] != stage:
            close()
            count = DownloadColumn() if UNITS.get(stage) == "bytes" else MofNCompleteColumn()
            bars = Bars(label, bar, count, left, console=console, disable=not console.is_terminal)
            bars.start()
            current.append((stage, bars, bars.add_task(stage, total=total)))
        current[0][1].update(current[0][2], completed=done, total=total)

    def close() -> None:
        while current:
            current.pop()[1].stop()

    try:
        yield show
    finally:
        close()


def show_report(report: Mapping[str, Any], as_json: bool) -> None:
    """The report of a conversion or verification on stdout: for scripts, or for people."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    if "counts" in report:
        print(", ".join(f"{count} tensors {fate}" for fate, count in report["counts"].items() if count))
    for note in report.get("notes", ()):
        print(note)
    if "verification" in report:
        for line in verification_lines(report["verification"]):
            print(line)
    if "folder" in report:
        print(f"wrote {report['folder']}")


def verification_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """What verification measured, for people."""
    for key, value in measured.items():
        if isinstance(value, Mapping):
            yield f"{key.replace('_', ' ')}:"
            yield from (f"  {line}" for line in verification_lines(value))
        else:
            yield f"{key.replace('_', ' ')}: {f'{value:.6g}' if isinstance(value, float) else value}"


def fail(message: str) -> None:
    """One line on stderr."""
    print(f"crosshead: {message}", file=sys.stderr)
