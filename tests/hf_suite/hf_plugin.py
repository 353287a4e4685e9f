"""A pytest plugin that writes each outcome, subtests included, as one JSON line to the file in HF_SUITE_OUT."""

import json
import os
import re
from pathlib import Path

import pytest

OUT = Path(os.environ["HF_SUITE_OUT"])


def reason(report: pytest.TestReport) -> str:
    """The last word of a skip or a failure, in one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ").strip()
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300]


def subtest(report: pytest.TestReport) -> str:
    """What a subtest is called, stock and ours alike; empty for the test itself."""
    context = getattr(report, "context", None)
    if context is None:
        return ""
    words = [context.msg] if context.msg else []
    words += [f"{key}={value}" for key, value in sorted(context.kwargs.items())]
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(words)).replace("Crosshead", "") or "subtest"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a report that decides the outcome of a test or of a subtest."""
    if report.when != "call" and report.outcome == "passed":
        return
    row = {"test": report.nodeid.split("::")[-1], "subtest": subtest(report), "outcome": report.outcome}
    if report.outcome != "passed":
        row["why"] = reason(report)
    with OUT.open("a") as file:
        file.write(json.dumps(row) + "\n")
