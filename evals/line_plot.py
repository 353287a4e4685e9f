"""Several lines in one field, with what each of them is."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from .plot_field import COLOURS, RIGHT, TOP, WIDTH, Field

Points = Sequence[tuple[float, float]]
SPACING = 24


def line_plot(lines: Mapping[str, Points], across: str, upwards: str) -> str:
    """An SVG picture of named lines."""
    points = [point for line in lines.values() for point in line]
    field = Field([x for x, _ in points], [y for _, y in points])
    parts = [*field.axes(across, upwards)]
    for index, (name, line) in enumerate(lines.items()):
        parts += _line(field, name, line, COLOURS[index % len(COLOURS)], TOP + 14 + SPACING * index)
    return field.picture(parts)


def _line(field: Field, name: str, line: Points, colour: str, height: int) -> Iterator[str]:
    drawn = " ".join(f"{field.x(x):.1f},{field.y(y):.1f}" for x, y in line)
    dots = "".join(f"M{field.x(x):.1f} {field.y(y):.1f}h0" for x, y in line)
    left = WIDTH - RIGHT + 20
    yield f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>'
    yield f'<path d="{dots}" fill="none" stroke="{colour}" stroke-width="6" stroke-linecap="round"/>'
    yield f'<path d="M{left} {height - 4}h22" stroke="{colour}" stroke-width="3"/>'
    yield f'<text x="{left + 30}" y="{height}">{escape(name)}</text>'
