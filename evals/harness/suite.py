"""Suites: tasks, metrics and few-shot counts, from the files in suites/."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from crosshead.common.errors import EvalError, nearest

SUITES = Path(__file__).parents[1] / "suites"


@dataclass(frozen=True)
class Benchmark:
    """One row of a paper's table, as a task of the harness."""

    name: str
    """The paper's."""
    task: str
    """The harness's: a task or a group of them."""
    metric: str | None = None
    """None means all that the task has."""
    filter: str = "none"
    """How the harness takes the answer out of a generated text."""
    shots: int | None = None
    """Examples before the question; None means as many as the task says."""


@dataclass(frozen=True)
class Suite:
    """Benchmarks that belong together."""

    name: str
    source: str
    """The paper and its table."""
    benchmarks: tuple[Benchmark, ...]
    missing: tuple[str, ...] = field(default=())
    """Benchmarks of the paper that the harness does not have."""
    limit: int | None = None
    """Items of each task; None means all."""


def suite_names() -> list[str]:
    """Those that come with crosshead."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def read_suite(name: str) -> Suite:
    """One of them."""
    if name not in suite_names():
        raise EvalError(f"there is no suite {name!r}: use {', '.join(suite_names())}{nearest(name, suite_names())}")
    content = yaml.safe_load((SUITES / f"{name}.yaml").read_text(encoding="utf-8"))
    benchmarks = tuple(_made(Benchmark, entry, name) for entry in content.pop("benchmarks"))
    missing = tuple(content.pop("missing", ()))
    return _made(Suite, {"name": name, "benchmarks": benchmarks, "missing": missing, **content}, name)


def suite_of_tasks(tasks: list[str]) -> Suite:
    """A user's own choice, with every metric that the tasks have."""
    return Suite("tasks", "--tasks", tuple(Benchmark(task, task) for task in dict.fromkeys(tasks)))


def _made(kind: Any, content: dict[str, Any], suite: str) -> Any:
    known = [entry.name for entry in fields(kind)]
    for key in content:
        if key not in known:
            raise EvalError(f"suite {suite} has an unknown key {key!r}{nearest(key, known)}")
    return kind(**content)
