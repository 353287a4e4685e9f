"""Numbers and tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

NOT_MEASURED = "not measured"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns: the first to the left, the others, which hold figures, to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell(part) for part in line)} |" for line in lines)


def cell(text: str) -> str:
    """Text that stays in its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def count(value: Any) -> str:
    """A whole number that can be read."""
    return f"{value:,}"


def figure(value: Any) -> str:
    """A measured number, to the digits that can be told apart."""
    if not isinstance(value, int | float):
        return NOT_MEASURED
    return (
        f"{value:.4f}"
        if 1e-3 <= abs(value) < 10 or value == 0
        else f"{value:.2f}"
        if 10 <= abs(value) < 1e5
        else f"{value:.3e}"
    )


def change(value: float) -> str:
    """A part of something as a percentage with its sign."""
    return f"{value:+.2%}" if abs(value) >= 5e-5 else f"{value:.2%}"


def size(number: float) -> str:
    """A large count in the unit that people use: 134.5M, 7.2B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}" if number < 100 * limit else f"{number / limit:.0f}{unit}"
    return f"{number:.0f}"


def volume(number: int) -> str:
    """Bytes in the unit that people use."""
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number} bytes"
