"""A sweep as an SVG picture: losses over tokens, dots for what was measured and lines for what was fitted.

Colours are between light and dark, and text follows the reader's setting, so that both backgrounds suit it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import mean
from typing import Any

from .scaling_law import ScalingLaw

WIDTH, HEIGHT = 960, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 280, 30, 60
"""What is around the field with the curves: at the right, what they are."""
COLOURS = ("#4c8bf5", "#e8710a", "#1e9e5a", "#c5459c", "#8a6de9", "#b58900", "#d9534f", "#2aa198")
DOTS, SEGMENTS, TICKS = 200, 60, 5
STYLE = """
  text { font: 13px sans-serif; fill: #333 }
  .axis { stroke: #888; stroke-width: 1; fill: none }
  .grid { stroke: #888; stroke-opacity: 0.25 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


def plot(report: Mapping[str, Any]) -> str:
    """The picture of a report that `sweep` makes."""
    field = _Field.around(report["runs"])
    parts = [*field.axes(report["loss"])]
    for index, run in enumerate(report["runs"]):
        colour = COLOURS[index % len(COLOURS)]
        parts += [*_curve(run, colour, field), *_legend(run, colour, index, run["learning_rate"] == report["chosen"])]
    inside = (
        f'<clipPath id="field"><rect x="{LEFT}" y="{TOP}" width="{field.width}" height="{field.height}"/></clipPath>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
            f"<style>{STYLE}</style>",
            f'<defs><clipPath id="field">{inside}</clipPath></defs>',
            *parts,
            "</svg>\n",
        ]
    )


class _Field:
    """Where tokens (logarithmic) and losses lie in the picture."""

    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def __init__(self, tokens: Sequence[float], losses: Sequence[float]) -> None:
        self.first, self.last = min(tokens), max(tokens)
        low, high = min(losses), max(losses)
        room = 0.05 * (high - low) or 0.1
        self.low, self.high = low - room, high + room

    @classmethod
    def around(cls, runs: Sequence[Mapping[str, Any]]) -> "_Field":
        """All of the runs; those that diverged may leave it upwards, where there are others."""
        curves = [run["curve"] for run in runs if run["law"]] or [run["curve"] for run in runs]
        dots = [dot for curve in curves for dot in _thinned(curve)] or [(1.0, 0.0)]
        return cls([tokens for tokens, _ in dots], [loss for _, loss in dots])

    def x(self, tokens: float) -> float:
        span = math.log(self.last / self.first) or 1.0
        return LEFT + self.width * math.log(tokens / self.first) / span

    def y(self, loss: float) -> float:
        return TOP + self.height * (self.high - loss) / (self.high - self.low)

    def axes(self, kind: str) -> Iterator[str]:
        """Frame, ticks and what they count."""
        bottom = TOP + self.height
        for step in range(TICKS):
            part = step / (TICKS - 1)
            tokens = self.first * (self.last / self.first) ** part
            loss = self.low + part * (self.high - self.low)
            x, y = self.x(tokens), self.y(loss)
            yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}h{self.width}"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{_short(tokens)}</text>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
        yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}h{self.width}"/>'
        yield f'<text x="{LEFT + self.width / 2}" y="{bottom + 44}" text-anchor="middle">tokens</text>'
        yield f'<text x="{LEFT}" y="{TOP - 10}">{escape(kind)} loss</text>'


def _curve(run: Mapping[str, Any], colour: str, field: _Field) -> Iterator[str]:
    dots = "".join(
        f"M{field.x(tokens):.1f} {field.y(loss):.1f}h0"
        for tokens, loss in _thinned(run["curve"])
        if math.isfinite(loss)
    )
    style = 'fill="none" clip-path="url(#field)"'
    yield f'<path d="{dots}" {style} stroke="{colour}" stroke-opacity="0.6" stroke-width="4" stroke-linecap="round"/>'
    if run["law"]:
        law = ScalingLaw(**run["law"])
        first, last = run["curve"]["tokens"][0], run["curve"]["tokens"][-1]
        points = [first * (last / first) ** (step / SEGMENTS) for step in range(SEGMENTS + 1)]
        line = " ".join(f"{field.x(tokens):.1f},{field.y(law.loss(tokens)):.1f}" for tokens in points)
        yield f'<polyline points="{line}" {style} stroke="{colour}" stroke-width="2"/>'


def _legend(run: Mapping[str, Any], colour: str, index: int, chosen: bool) -> Iterator[str]:
    x, y = WIDTH - RIGHT + 20, TOP + 14 + 58 * index
    told = run["told"] or ("chosen" if chosen else "stable")
    fitted = f"fitted {run['fitted_loss']:.4f}, " if run["law"] else ""
    yield f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="3"/>'
    yield f'<text x="{x + 30}" y="{y}" font-weight="bold">{run["learning_rate"]:g}</text>'
    yield f'<text x="{x + 30}" y="{y + 17}">{fitted}{run["spikes"]} spikes</text>'
    yield f'<text x="{x + 30}" y="{y + 34}">{escape(told.partition(":")[0])}</text>'


def _thinned(curve: Mapping[str, Sequence[float]]) -> list[tuple[float, float]]:
    """Not more dots than can be told apart: means of neighbours."""
    size = math.ceil(len(curve["losses"]) / DOTS) or 1
    starts = range(0, len(curve["losses"]), size)
    return [(mean(curve["tokens"][at : at + size]), mean(curve["losses"][at : at + size])) for at in starts]


def _short(number: float) -> str:
    """As in 1.5B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
