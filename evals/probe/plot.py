"""Line plots as SVG, with axes and a legend, readable on light and dark backgrounds."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

import numpy

WIDTH, HEIGHT = 960, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 280, 30, 60
"""Margins of the plotting area; the legend is at the right."""
COLOURS = ("#4c8bf5", "#e8710a", "#1e9e5a", "#c5459c", "#8a6de9", "#b58900", "#d9534f", "#2aa198")
TICKS = 5
STYLE = """
  text { font: 13px sans-serif; fill: #333 }
  .axis { stroke: #888; stroke-width: 1; fill: none }
  .grid { stroke: #888; stroke-opacity: 0.25 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


class Field:
    """The plotting area: x from the minimum to the maximum, y with a margin."""

    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def __init__(self, across: Sequence[float], upwards: Sequence[float], logarithmic: bool = False) -> None:
        self.first, self.last, self.logarithmic = min(across), max(across), logarithmic
        low, high = min(upwards), max(upwards)
        room = 0.05 * (high - low) or 0.1
        self.low, self.high = low - room, high + room

    def x(self, number: float) -> float:
        """Pixels from the left edge."""
        first, last = self.first, self.last
        if self.logarithmic:
            number, first, last = math.log(number), math.log(first), math.log(last)
        return LEFT + self.width * (number - first) / ((last - first) or 1.0)

    def y(self, number: float) -> float:
        """Pixels from the top edge."""
        return TOP + self.height * (self.high - number) / (self.high - self.low)

    def axes(self, across: str, upwards: str) -> Iterator[str]:
        """The axes with ticks and labels."""
        bottom = TOP + self.height
        ticks = numpy.geomspace(self.first, self.last, TICKS) if self.logarithmic else None
        for number in round_numbers(self.first, self.last) if ticks is None else ticks:
            x = self.x(number)
            yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{short(number)}</text>'
        for number in round_numbers(self.low, self.high):
            y = self.y(number)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}h{self.width}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(number)}</text>'
        yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}h{self.width}"/>'
        yield f'<text x="{LEFT + self.width / 2}" y="{bottom + 44}" text-anchor="middle">{escape(across)}</text>'
        yield f'<text x="{LEFT}" y="{TOP - 10}">{escape(upwards)}</text>'

    def picture(self, parts: Iterable[str]) -> str:
        """The picture; `url(#field)` clips a part at the axes."""
        clip = f'<rect x="{LEFT}" y="{TOP}" width="{self.width}" height="{self.height}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">\n<style>{STYLE}</style>'
        return "\n".join([head, f'<defs><clipPath id="field">{clip}</clipPath></defs>', *parts, "</svg>\n"])


def round_numbers(first: float, last: float) -> list[float]:
    """About `TICKS` numbers from the first to the last, all multiples of 1, 2 or 5 times a power of ten."""
    if first == last:
        return [first]
    rough = (last - first) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    steps = range(math.ceil(first / size - 1e-9), math.floor(last / size + 1e-9) + 1)
    return [round(step * size, 12) for step in steps]


def short(number: float) -> str:
    """A number with a suffix, such as 1.5B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


Points = Sequence[tuple[float, float]]
SPACING = 24


def line_plot(lines: Mapping[str, Points], across: str, upwards: str) -> str:
    """The SVG of named lines."""
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
