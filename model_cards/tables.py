"""Formats numbers and tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOT_MEASURED = "not measured"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned to the left, the others to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell(part) for part in line)} |" for line in lines)


def cell(text: str) -> str:
    """The text of one cell: on one line, with column separators escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def figure(value: Any) -> str:
    """A measured number with about five significant digits, or `not measured` for other values."""
    if not isinstance(value, int | float):
        return NOT_MEASURED
    return (
        f"{value:.4f}"
        if 1e-3 <= abs(value) < 10 or value == 0
        else f"{value:.2f}"
        if 10 <= abs(value) < 1e5
        else f"{value:.3e}"
    )


def metric_name(row: Mapping[str, Any]) -> str:
    """The metric of a score, with the filter of the answers if there is one."""
    return str(row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})")


def change(value: float) -> str:
    """A relative change as a percentage with its sign."""
    return f"{value:+.2%}" if abs(value) >= 5e-5 else f"{value:.2%}"


def size(number: float) -> str:
    """A large number with a suffix, such as 135M or 7.2B."""
    number = float(f"{number:.3g}")  # 999,950 is 1M
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}" if number < 100 * limit else f"{number / limit:.0f}{unit}"
    return f"{number:.0f}"
