"""Shows progress bars, and prints the report of a conversion or verification."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # crosshead takes seconds to import
    from crosshead.common.progress import Progress

UNITS = {"writing": "bytes", "checking": "bytes"}
"""Stage -> unit, for stages that do not count layers."""
HOUR = 3600
"""Seconds over which the speed is averaged to estimate the remaining time: a step of a large model takes minutes."""
CALIBRATED_ON = ("text", "images", "saved")
"""Fields of a calibration record that may name its data; the first that exists applies."""
SIDES = ("key_heads", "value_heads", "active_heads")
"""Options whose value may be chosen per layer."""


class InterruptedByUserError(Exception):
    """Replaces a `KeyboardInterrupt`, whose notes typer would drop; the notes are the message."""


class TimeLeft:
    """Estimates the time left of each stage from its speed since it started."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, int]] = {}
        self._latest: dict[str, int] = {}

    def update(self, stage: str, done: int, total: int | None) -> str:
        """Note the progress of a stage; return the time left as text, which is empty if it is unknown."""
        now = time.monotonic()
        if stage not in self._begun or done == 0 or done < self._latest[stage]:  # it starts, or starts again
            self._begun[stage] = (now, done)
        self._latest[stage] = done
        since, first = self._begun[stage]
        if not total or not first < done < total:
            return ""
        seconds = (now - since) / (done - first) * (total - done)
        return f", {timedelta(seconds=round(seconds))} left" if seconds < timedelta.max.total_seconds() else ""


@contextmanager
def progress() -> Iterator["Progress"]:
    """Show one bar per stage with the remaining time on stderr; without a terminal, only messages.

    Hides the bars of transformers and, without a terminal, those of huggingface_hub.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from transformers.utils.logging import disable_progress_bar

    console, shows_downloads = Console(stderr=True), not are_progress_bars_disabled()
    disable_progress_bar()  # also hides the bars of huggingface_hub
    if console.is_terminal and shows_downloads:
        enable_progress_bars()
    else:
        disable_progress_bars()
    label, bar = TextColumn("{task.description:<12}"), BarColumn()
    remaining = TimeRemainingColumn(elapsed_when_finished=True)
    current: list[tuple[str, Bars, Any]] = []
    messages: dict[str, str] = {}
    time_left = TimeLeft()

    def show(stage: str, done: int, total: int | None, message: str = "") -> None:
        left = time_left.update(stage, done, total)
        if not current or current[0][0] != stage:
            close()
            count = DownloadColumn(binary_units=True) if UNITS.get(stage) == "bytes" else MofNCompleteColumn()
            bars = Bars(
                label,
                bar,
                count,
                remaining,
                TextColumn("{task.fields[message]}"),
                console=console,
                speed_estimate_period=HOUR,
                disable=not console.is_terminal,
            )
            bars.start()
            current.append((stage, bars, bars.add_task(stage, total=total, message=message)))
        if not console.is_terminal and message != messages.get(stage, ""):
            messages[stage] = message
            console.print(f"{stage} {done} of {total}: {message}{left}", soft_wrap=True, highlight=False)
        current[0][1].update(current[0][2], completed=done, total=total, message=message)

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
    """Print the report of a conversion or verification to stdout, as JSON or as text."""
    print(json.dumps(report, indent=2) if as_json else "\n".join(report_lines(report)))


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    if "counts" in report:
        yield ", ".join(f"{count} tensors {action}" for action, count in report["counts"].items() if count)
    yield from plan_lines(report) if "bytes" in report else dropped_lines(report)
    yield from (*gguf_lines(report), *calibration_lines(report))
    yield from verification_lines(report.get("verification", {}))
    yield from verification_lines({name: report[name] for name in ("kept_cache", "engine") if name in report})
    if "others" in report:
        yield f"files left unchanged, not part of a model: {', '.join(report['others'])}"
    if "folder" in report:
        yield f"wrote {report['folder']}"


def dropped_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each reason to drop tensors of the source; a dry run has one for each tensor."""
    names: dict[str, list[str]] = {}
    for name, reason in report.get("dropped", {}).items():
        names.setdefault(reason, []).append(name)
    for reason, (first, *more) in names.items():
        yield f"dropped {first}{f' and {len(more)} more' if more else ''}: {reason}"


def plan_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines with the plan of a dry run: sizes, and every tensor that is not copied."""
    from crosshead.common.file_bytes import byte_size

    yield f"{byte_size(report['bytes'])} to write"
    before, after = (report[f"kv_bytes_per_token_{when}"] for when in ("before", "after"))
    if before:  # an encoder has no cache
        yield f"KV cache: {before} bytes per token before, {after} after"
    for name, tensor in report["tensors"].items():
        if tensor["fate"] != "copied":
            yield f"{tensor['fate']} {name} {tensor['shape']} {tensor['dtype']}"
    yield from (f"dropped {name}: {reason}" for name, reason in report["dropped"].items())


def gguf_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines with the formats of the tensors in a GGUF file."""
    if gguf := report.get("gguf"):
        counts = Counter(gguf["tensors"].values())
        yield f"GGUF: {', '.join(f'{count} tensors {name}' for name, count in counts.items())}"
        if others := gguf["not_quantised"]:
            yield f"F16 because their rows are no multiple of a block: {', '.join(others)}"


def calibration_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines with the calibration data, the chosen groups or heads per layer, and the joint fit."""
    if calibration := report.get("calibration"):
        yield f"calibrated on {next(calibration[kind] for kind in CALIBRATED_ON if kind in calibration)}"
    chosen = report.get("chosen", {})
    if "groups" in chosen:
        yield f"groups of heads: {chosen['groups']}; fitted error by groups, relative to one group's:"
        yield from (f"  {groups}: {error:.4f}" for groups, error in chosen["fitted_errors"].items())
    if "text" in chosen:
        yield f"layers chosen on {chosen['text']}"
        divergence = f"expected KL divergence: {chosen['expected_divergence']:.4f} nats a token"
        parts = (("KV cache", "cache", "the source's"), ("active heads", "active", "all heads"))
        budgets = [f"{title}: {chosen[key]:.1%} of {whole}" for title, key, whole in parts if key in chosen]
        yield "; ".join([*budgets, divergence])
        for side in (side for side in SIDES if side in chosen):
            yield f"{side} by layer: {' '.join(map(str, chosen[side]))}".replace("_", " ")
    if (fitted := report.get("joint_fit")) and "left_out" in fitted:
        yield f"joint fit of all layers left out: {fitted['left_out']}"
    elif fitted:
        divergences = " to ".join(f"{fitted[f'divergence_{when}']:.4f}" for when in ("before", "after"))
        yield f"all layers fitted jointly: KL divergence {divergences} nats a token on the calibration text"


def verification_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """Lines with the results of verification."""
    for key, value in measured.items():
        if isinstance(value, Mapping):
            yield f"{key.replace('_', ' ')}:"
            yield from (f"  {line}" for line in verification_lines(value))
        else:
            yield f"{key.replace('_', ' ')}: {shown(value)}"


def shown(value: Any) -> str:
    """A value on one line. Text that a model generated is quoted if it has line breaks."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)
