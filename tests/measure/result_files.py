"""Reads the files in `evals/results/`, and replaces missing ones by a line of text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rules import ROOT

RESULTS = ROOT / "evals" / "results"
NOT_MEASURED = "not measured yet"
Content = Mapping[str, Any]


def option_text(value: Any) -> str:
    """The value of a mechanism's option in the syntax of `--mixer`."""
    return "+".join(value) if isinstance(value, list) else str(value).lower()


def written_by(path: Path, command: str, table: Callable[[Content], str]) -> Callable[[], str]:
    """A function that returns the table of a result file, or, if the file is missing, a line with its `command`."""
    return lambda: table(json.loads(path.read_bytes())) if path.is_file() else f"`{command}`: {NOT_MEASURED}.\n"
