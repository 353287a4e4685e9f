"""Plots a sweep: measured losses as dots, fitted power laws as lines."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import mean
from typing import Any

from crosshead.evals.probe.plot import COLOURS, RIGHT, TOP, WIDTH, Field

from .scaling_law import ScalingLaw

DOTS, SEGMENTS = 200, 60


def plot(report: Mapping[str, Any]) -> str:
    """The picture of a report that `sweep` makes."""
    field = _field(report["runs"])
    parts = [*field.axes("tokens", f"{report['loss']} loss")]
    for index, run in enumerate(report["runs"]):
        colour = COLOURS[index % len(COLOURS)]
        parts += [*_curve(run, colour, field), *_legend(run, colour, index, run["learning_rate"] == report["chosen"])]
    return field.picture(parts)


def _field(runs: Sequence[Mapping[str, Any]]) -> Field:
    """Around all of the runs; those that diverged may leave it upwards, where there are others."""
    curves = [run["curve"] for run in runs if run["law"]] or [run["curve"] for run in runs]
    dots = [dot for curve in curves for dot in _thinned(curve)] or [(1.0, 0.0)]
    return Field([tokens for tokens, _ in dots], [loss for _, loss in dots], logarithmic=True)


def _curve(run: Mapping[str, Any], colour: str, field: Field) -> Iterator[str]:
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
