"""The page of a report: one HTML file with its styles, scripts and data inside."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

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
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")
