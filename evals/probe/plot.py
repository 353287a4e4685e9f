"""Line plots as SVG, readable on light and dark backgrounds."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

GREY = "#808080"
STYLE: Any = {
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelcolor": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "crosshead",  # the same plot gives the same file
    "xtick.color": GREY,
    "ytick.color": GREY,
}
Points = Sequence[tuple[float, float]]


@contextmanager
def svg_plot(x_label: str, y_label: str) -> Iterator[tuple[Any, io.StringIO]]:
    """Yield axes to draw on, and a stream that holds the SVG after the block. Lines with a gid are in the legend."""
    import matplotlib
    from matplotlib.figure import Figure

    picture = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=x_label, ylabel=y_label)
        yield axes, picture
        named = [line for line in axes.lines if line.get_gid()]
        labels = [str(line.get_label()).replace("$", r"\$") for line in named]  # matplotlib reads $ as a formula
        axes.legend(named, labels, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})


def line_plot(lines: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Return the SVG of a plot with named lines."""
    with svg_plot(x_label, y_label) as (axes, picture):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name, gid=name)
    return picture.getvalue()
