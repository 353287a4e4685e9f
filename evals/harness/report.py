"""Formats an evaluation report as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
LARGEST_PERCENTAGE = 10.0
"""As a number: what has grown more is shown as a factor."""


def eval_lines(report: Report) -> Iterator[str]:
    """Scores with standard errors, what the suite lacks, and the comparisons."""
    yield from _scores(report)
    for model in report["models"]:
        for row in model["scores"]:
            if row["items_cut"]:
                yield (
                    f"{row['name']}: {row['items_cut']} of {row['items']} items are longer than the context of "
                    f"{model['model']} ({model['context']} tokens): their beginning was cut off"
                )
    if report["suite"]["missing"]:
        yield f"not in the harness: {', '.join(report['suite']['missing'])}"
    for comparison in report["compared"]:
        yield ""
        yield from _comparison(comparison, report["confidence"])


def _scores(report: Report) -> Iterator[str]:
    models = report["models"]
    heads = ["task", "metric", "shots", "items", *(model["model"] for model in models)]
    lines = []
    for index, row in enumerate(models[0]["scores"]):
        scores = [_score(model["scores"][index]) for model in models]
        shots = "" if row["shots"] is None else str(row["shots"])
        lines.append([row["name"], _metric(row), shots, str(row["items"]), *scores])
    if models[0]["average"] is not None:
        lines.append(["average", "", "", "", *(_score(model["average"]) for model in models)])
    yield from _table(heads, lines)


def _comparison(comparison: Report, confidence: float) -> Iterator[str]:
    yield f"{comparison['second']} minus {comparison['first']}, on the same items, {confidence:.0%} interval"
    lines = [
        [row["name"], _metric(row), _change(row), f"{row['items_that_differ']} of {row['items']}", row["verdict"]]
        for row in comparison["scores"]
    ]
    yield from _table(["task", "metric", "change", "items that differ", ""], lines)
    for row in comparison["left_out"]:
        yield f"not compared: {row['name']}, {_metric(row)}, which is no mean over items"


def _metric(row: Report) -> str:
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def _score(row: Report) -> str:
    error = row["standard_error"]
    return _figure(row["score"]) + ("" if error is None else f" ± {_figure(error)}")


def _figure(value: float) -> str:
    """Four digits after the point for what lies between 0 and 1, as the harness shows them."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3e}"


def _change(row: Report) -> str:
    change, *bounds = (_step(value, row["scale"]) for value in (row["change"], *(row["interval"] or ())))
    return f"{change}  [{', '.join(bounds)}]" if bounds else change


def _step(value: float, scale: str) -> str:
    if scale == "difference":
        return f"{value:+.4f}"
    return f"{value:+.2%}" if value < LARGEST_PERCENTAGE else f"x{1 + value:.3g}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need to be, words to the left and the rest to the right."""
    rows = [list(heads), *map(list, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
