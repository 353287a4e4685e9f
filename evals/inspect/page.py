"""Writes a report: an HTML page with styles, scripts and data inside, and its data as JSON."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from crosshead.common.atomic_write import check_targets, write_whole
from crosshead.common.errors import EvalError

STYLE, TEMPLATE = "style.css", "page.html"
SCRIPTS = (
    "dom.js",
    "colour.js",
    "data.js",
    "state.js",
    "figure.js",
    "bar.js",
    "overview.js",
    "gallery.js",
    "inspector.js",
    "matrices.js",
    "routing.js",
    "norms.js",
    "similarity.js",
    "start.js",
)
"""In the order in which they need each other."""


def report_text(report: Mapping[str, Any]) -> str:
    """The report as JSON."""
    return json.dumps(report, separators=(",", ":"), allow_nan=False) + "\n"


def page_text(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    script = "\n".join(_asset(name) for name in SCRIPTS)
    # A text may hold anything, and an HTML parser looks for `</script>` and `<!--` in scripts and data alike.
    data = report_text(report).replace("<", "\\u003c")
    page = _asset(TEMPLATE)
    for name, content in (("style", _asset(STYLE)), ("script", script), ("data", data)):
        before, _, after = page.partition(f"{{{{{name}}}}}")
        page = before + content.rstrip() + after
    return page


def _asset(name: str) -> str:
    return (files("crosshead.evals") / "page" / name).read_text(encoding="utf-8")


PAGE, DATA = ".html", ".json"


def check_target(page: Path, overwrite: bool) -> None:
    """`EvalError` where the files could not be written, before the work is done."""
    if page.suffix != PAGE:
        raise EvalError(f"{page} does not end in {PAGE}: the page goes there, and its data beside it, in {DATA}")
    check_targets([page, page.with_suffix(DATA)], overwrite)


def write_report(report: Mapping[str, Any], page: Path) -> list[Path]:
    """Write the data, and the page made of nothing else; returns both paths."""
    data = report_text(report)
    contents = {page.with_suffix(DATA): data, page: page_text(json.loads(data))}
    write_whole(contents)
    return list(contents)
