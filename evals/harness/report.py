"""Formats an evaluation report as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
MAXIMUM_PERCENTAGE = 10.0
"""Relative changes below this are shown as a percentage (10.0 is +1000%), larger ones as a factor."""


def eval_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report: scores with standard errors, truncated items, missing benchmarks, comparisons."""
    yield from _scores(report)
    for model in report["models"]:
        # By name, since all metrics of a task have the same items.
        truncated = {row["name"]: row for row in model["scores"] if row["items_cut"]}
        for row in truncated.values():
            part = "end" if "data" in report else "beginning"
            yield (
                f"{row['name']}: {row['items_cut']} of {row['items']} items are longer than the context of "
                f"{model['model']} ({model['context']} tokens): their {part} was removed"
            )
    if report["suite"]["missing"]:
        yield f"not in the harness: {', '.join(report['suite']['missing'])}"
    for comparison in report["compared"]:
        yield ""
        yield from _comparison(comparison, report["confidence"])


def _scores(report: Report) -> Iterator[str]:
    models = report["models"]
    lines = [["task", "metric", "shots", "items", *(model["model"] for model in models)]]
    for row, *others in zip(*(model["scores"] for model in models), strict=True):
        shots = "" if row["shots"] is None else str(row["shots"])
        lines.append([row["name"], _metric(row), shots, str(row["items"]), *map(_score, [row, *others])])
    if models[0]["average"] is not None:
        lines.append(["average", "", "", "", *(_score(model["average"]) for model in models)])
    yield from _table(lines)


def _comparison(comparison: Report, confidence: float) -> Iterator[str]:
    yield f"{comparison['second']} minus {comparison['first']}, on the same items, {confidence:.0%} interval"
    lines = [["task", "metric", "change", "items that differ", ""]]
    for row in comparison["scores"]:
        differing = f"{row['items_that_differ']} of {row['items']}"
        lines.append([row["name"], _metric(row), _change(row), differing, row["verdict"]])
    yield from _table(lines)
    for row in comparison["left_out"]:
        yield f"not compared: {row['name']}, {_metric(row)}, which is not a mean over items"


def _metric(row: Report) -> str:
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def _score(row: Report) -> str:
    error = row["standard_error"]
    return _figure(row["score"]) + ("" if error is None else f" ± {_figure(error)}")


def _figure(value: float) -> str:
    """Format a score: four digits after the point between 0 and 1, as in the harness."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3e}"


def _change(row: Report) -> str:
    change, *bounds = (_step(value, row["scale"]) for value in (row["change"], *(row["interval"] or ())))
    return f"{change}  [{', '.join(bounds)}]" if bounds else change


def _step(value: float, scale: str) -> str:
    if scale == "difference":
        return f"{value:+.4f}"
    return f"{value:+.2%}" if value < MAXIMUM_PERCENTAGE else f"x{1 + value:.3g}"


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: two columns of words, aligned to the left, then numbers, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        yield "  ".join(cells).rstrip()
