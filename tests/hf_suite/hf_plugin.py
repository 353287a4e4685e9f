"""A pytest plugin that writes each outcome, also of subtests, as one JSON line to the file in HF_SUITE_OUT."""

import json
import os
import re
from pathlib import Path

import pytest

OUT = Path(os.environ["HF_SUITE_OUT"])


def reason(report: pytest.TestReport) -> str:
    """The reason of a skip, or the message of a failure, on one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ").strip()
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300]


def subtest(report: pytest.TestReport) -> str:
    """The name of a subtest, the same for the stock class and ours; empty for the test itself."""
    context = getattr(report, "context", None)
    if context is None:
        return ""
    words = [context.msg] if context.msg else []
    words += [f"{key}={value}" for key, value in sorted(context.kwargs.items())]
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(words)).replace("Crosshead", "") or "subtest"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test or subtest; a passed setup or teardown is not an outcome."""
    if report.when != "call" and report.outcome == "passed":
        return
    row = {"test": report.nodeid.split("::")[-1], "subtest": subtest(report), "outcome": report.outcome}
    if report.outcome != "passed":
        row["why"] = reason(report)
    with OUT.open("a") as file:
        file.write(json.dumps(row) + "\n")
