"""Writes a report as an HTML page that contains its styles, scripts and data, and the data as JSON."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from crosshead.common.atomic_write import check_targets, write_atomically
from crosshead.common.errors import EvalError

PAGE, DATA = ".html", ".json"
PLACEHOLDER = re.compile(r"\{\{([\w.]+)\}\}")
"""Placeholder in page.html: the name of a file in page/, or `data`."""


def check_target(page: Path, overwrite: bool) -> None:
    """Raise `EvalError` if the page or its data cannot be written; called before the models run."""
    if page.suffix != PAGE:
        raise EvalError(f"{page} does not end in {PAGE}: its data is written to the same name with {DATA}")
    check_targets([page, page.with_suffix(DATA)], overwrite)


def write_report(report: Mapping[str, Any], page: Path) -> list[Path]:
    """Write the data and the page; return both paths."""
    contents = {page.with_suffix(DATA): report_text(report), page: page_text(report)}
    write_atomically(contents)
    return list(contents)


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as JSON."""
    return json.dumps(report, separators=(",", ":"), allow_nan=False) + "\n"


def page_text(report: Mapping[str, Any]) -> str:
    """Return the report as an HTML page."""
    folder = files("crosshead.evals") / "page"

    def content(placeholder: re.Match[str]) -> str:
        if placeholder[1] == "data":
            # An HTML parser looks for `</script>` and `<!--` in scripts and data alike.
            return report_text(report).rstrip().replace("<", "\\u003c")
        return (folder / placeholder[1]).read_text(encoding="utf-8").rstrip()

    return PLACEHOLDER.sub(content, (folder / "page.html").read_text(encoding="utf-8"))
