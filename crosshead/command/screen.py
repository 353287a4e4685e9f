"""Progress bars while a command runs, and its printed report."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

UNITS = {"writing": "bytes", "checking": "bytes"}
"""The units of stages; the default is a count."""
HOUR = 3600
"""The seconds from which the remaining time is estimated: one step of a large model may take minutes."""
SIDES = ("key_heads", "value_heads")


class InterruptedByUserError(Exception):
    """Ctrl-C, with the notes of its `KeyboardInterrupt`, which typer would drop."""


class Progress(Protocol):
    """Called with the stage, the amount done, the total if it is known, and a message."""

    def __call__(self, stage: str, done: int, total: int | None, told: str = "") -> None:
        """Show the progress."""


@contextmanager
def progress() -> Iterator[Progress]:
    """Bars on stderr, one for each stage, with the remaining time; without a terminal, only messages."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        disable_progress_bars()  # the Hub's own
    label, bar = TextColumn("{task.description:<12}"), BarColumn()
    left = TimeRemainingColumn(elapsed_when_finished=True)
    current: list[tuple[str, Bars, Any]] = []
    shown_messages: dict[str, str] = {}
    started: dict[str, tuple[float, int]] = {}

    def time_left(stage: str, done: int, total: int | None) -> str:
        since, first = started[stage]
        if not total or not first < done < total:
            return ""
        return f", {timedelta(seconds=round((time.monotonic() - since) / (done - first) * (total - done)))} left"

    def show(stage: str, done: int, total: int | None, told: str = "") -> None:
        started.setdefault(stage, (time.monotonic(), done))
        if not current or current[0][0] != stage:
            close()
            count = DownloadColumn() if UNITS.get(stage) == "bytes" else MofNCompleteColumn()
            bars = Bars(
                label,
                bar,
                count,
                left,
                TextColumn("{task.fields[told]}"),
                console=console,
                speed_estimate_period=HOUR,
                disable=not console.is_terminal,
            )
            bars.start()
            current.append((stage, bars, bars.add_task(stage, total=total, told=told)))
        if not console.is_terminal and told != shown_messages.get(stage, ""):
            shown_messages[stage] = told
            console.print(
                f"{stage} {done} of {total}: {told}{time_left(stage, done, total)}", soft_wrap=True, highlight=False
            )
        current[0][1].update(current[0][2], completed=done, total=total, told=told)

    def close() -> None:
        while current:
            current.pop()[1].stop()

    try:
        yield show
    except KeyboardInterrupt as error:
        raise InterruptedByUserError("; ".join(getattr(error, "__notes__", []))) from error
    finally:
        close()


def show_report(report: Mapping[str, Any], as_json: bool) -> None:
    """Print the report of a conversion or verification, as JSON or as text."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    if "counts" in report:
        print(", ".join(f"{count} tensors {action}" for action, count in report["counts"].items() if count))
    for line in calibration_lines(report):
        print(line)
    if "verification" in report:
        for line in verification_lines(report["verification"]):
            print(line)
    if "others" in report:
        print(f"unchanged files that are not part of the model: {', '.join(report['others'])}")
    if "folder" in report:
        print(f"wrote {report['folder']}")


def calibration_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The calibration text of a conversion, and the layers chosen by it, as text."""
    if calibration := report.get("calibration"):
        yield f"calibrated on {calibration.get('text') or calibration['saved']}"
    if chosen := report.get("chosen"):
        yield f"layers chosen on {chosen['text']}"
        yield from (f"{side} by layer: {' '.join(map(str, chosen[side]))}".replace("_", " ") for side in SIDES)


def verification_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """The results of a verification, as text."""
    for key, value in measured.items():
        if isinstance(value, Mapping):
            yield f"{key.replace('_', ' ')}:"
            yield from (f"  {line}" for line in verification_lines(value))
        else:
            yield f"{key.replace('_', ' ')}: {shown(value)}"


def shown(value: Any) -> str:
    """A value on one line: a model's text may contain any character."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)
