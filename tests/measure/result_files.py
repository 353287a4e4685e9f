"""The files in `evals/results/`, and what stands for one that is not there."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rules import ROOT

RESULTS = ROOT / "evals" / "results"
NOT_MEASURED = "not measured yet"
Content = Mapping[str, Any]


def option_text(value: Any) -> str:
    """The value of an option as `--mixer` takes it."""
    return "+".join(value) if isinstance(value, list) else str(value).lower()


def written_by(path: Path, command: str, table: Callable[[Content], str]) -> Callable[[], str]:
    """A table of one file of results, or a line that says that there is none."""
    return lambda: table(json.loads(path.read_bytes())) if path.is_file() else f"`{command}`: {NOT_MEASURED}.\n"
