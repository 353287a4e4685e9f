"""The two files of a report: both complete, or neither."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .inspect_page import page_text, report_text

PAGE, DATA = ".html", ".json"


def check_target(page: Path, overwrite: bool) -> None:
    """`ValueError` where the files could not be written, before the work is done."""
    if page.suffix != PAGE:
        raise ValueError(f"{page} does not end in {PAGE}: the page goes there, and its data beside it, in {DATA}")
    folder = page.parent
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written to: choose another folder")
    for path in (page, page.with_suffix(DATA)):
        if path.is_dir():
            raise ValueError(f"{path} is a folder: choose another name")
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists: choose another name, or add --overwrite")


def write_report(report: Mapping[str, Any], page: Path) -> list[Path]:
    """Write the data, and the page made of nothing else; returns both paths."""
    data = report_text(report)
    contents = {page.with_suffix(DATA): data, page: page_text(json.loads(data))}
    partial = {path: path.with_name(f".{path.name}.partial") for path in contents}
    try:
        for path, content in contents.items():
            partial[path].write_text(content, encoding="utf-8")
        for path in contents:
            partial[path].replace(path)
    except OSError as error:
        raise ValueError(f"{page} cannot be written: {error.strerror}") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return list(contents)
