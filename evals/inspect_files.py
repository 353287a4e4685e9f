"""The two files of a report: the page, and the data that it is made of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import EvalError
from .inspect_page import page_text, report_text
from .whole_files import check_targets, write_whole

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
