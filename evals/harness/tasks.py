"""Loads suites of benchmarks and their tasks: from lm-evaluation-harness, from tasks/, or from the user's files."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed

from crosshead.common.errors import EvalError, nearest, one_line

SUITES, TASKS = (Path(__file__).parents[1] / name for name in ("suites", "tasks"))
"""Folders of the shipped suites and of the tasks of the offline suite (an `--include_path` for plain lm_eval)."""


@dataclass(frozen=True)
class Benchmark:
    """One row of a paper's table, and the task of the harness that measures it."""

    name: str
    """Name of the benchmark in the paper."""
    task: str
    """Name of the task, group or tag in the harness."""
    metric: str | None = None
    """Name of the metric in the harness; None means every metric of the task."""
    filter: str = "none"
    """Filter of the harness, which extracts the answer from a generated text."""
    shots: int | None = None
    """Number of few-shot examples; None means the default of the task."""


@dataclass(frozen=True)
class Suite:
    """A list of benchmarks."""

    name: str
    source: str
    """The paper and its table; `--tasks` for the user's tasks."""
    benchmarks: tuple[Benchmark, ...]
    missing: tuple[str, ...] = ()
    """Benchmarks of the paper that the harness does not have."""
    limit: int | None = None
    """Maximum number of items of each task; None means all."""


def suite_names() -> list[str]:
    """Return the names of the shipped suites."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def read_suite(name: str) -> Suite:
    """Return a shipped suite by its name."""
    if name not in suite_names():
        raise EvalError(f"there is no suite {name!r}: use {', '.join(suite_names())}{nearest(name, suite_names())}")
    content = yaml.safe_load((SUITES / f"{name}.yaml").read_text(encoding="utf-8"))
    benchmarks = tuple(Benchmark(**entry) for entry in content.pop("benchmarks"))
    return Suite(name=name, benchmarks=benchmarks, missing=tuple(content.pop("missing", ())), **content)


def suite_of_tasks(tasks: Sequence[str]) -> Suite:
    """Return a suite of the user's tasks, with all their metrics."""
    return Suite("tasks", "--tasks", tuple(Benchmark(task, task) for task in dict.fromkeys(tasks)))


@dataclass(frozen=True)
class LoadedBenchmark:
    """A benchmark with its task, whose data is loaded."""

    benchmark: Benchmark
    task: Any
    """Task or group object of the harness."""
    members: list[Any]
    """The task itself, or the tasks of the group."""

    @property
    def is_group(self) -> bool:
        """True if the harness averages over the tasks of a group."""
        return self.task is not self.members[0]

    @property
    def name(self) -> str:
        """Key of the benchmark in the harness's results."""
        return str(self.task.name if self.is_group else self.task.task_name)


def _task_manager(benchmarks: Sequence[Benchmark], include_path: Path | None) -> Any:
    """Return the harness's index of tasks. Indexing its own thousands of tasks is slow, and only done if needed."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise EvalError(f"--include-path {include_path} is not a directory: give the one with your YAML files")
    paths = [str(path) for path in (TASKS, include_path) if path is not None]
    own = TaskManager(include_path=paths, include_defaults=False)
    if all(benchmark.task in own.all_subtasks for benchmark in benchmarks):  # a group may hold the harness's tasks
        return own
    return TaskManager(include_path=paths)


def load_tasks(benchmarks: Sequence[Benchmark], include_path: Path | None, run_code: bool) -> list[LoadedBenchmark]:
    """Check the names of the tasks and load their data.

    `include_path` is a directory with the user's tasks; `run_code` allows tasks that run code written by the model.
    """
    manager = _task_manager(benchmarks, include_path)
    known = manager.all_tasks
    for task in (benchmark.task for benchmark in benchmarks):
        if task not in known:
            raise EvalError(f"there is no task {task!r}{nearest(task, known) or ': `lm_eval ls tasks` lists them'}")
    if run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric requires it
    else:  # the module of such a task may fail to import; the tasks of a group are known only after loading
        entries = [manager.task_index[benchmark.task] for benchmark in benchmarks]
        _refuse_code([entry.name for entry in entries if (entry.cfg or {}).get("unsafe_code")])
    loaded = [each for benchmark in benchmarks for each in _load(manager, benchmark)]
    members = [task for benchmark in loaded for task in benchmark.members]
    if not run_code:
        _refuse_code([task.task_name for task in members if getattr(task, "UNSAFE_CODE", False)])
    names = [task.task_name for task in members]
    for name in names:
        if names.count(name) > 1:
            raise EvalError(f"the task {name} is given twice, alone or in a group: remove one of them")
    return loaded


def _refuse_code(tasks: Sequence[str]) -> None:
    if tasks:
        raise EvalError(
            f"{', '.join(tasks)} would run code that the model writes on this machine: allow it with "
            "--confirm-run-unsafe-code, or choose other tasks with --tasks"
        )


def _load(manager: Any, benchmark: Benchmark) -> list[LoadedBenchmark]:
    """Load the benchmark's task or group, or all tasks of its tag."""
    seed()  # some tasks shuffle the choices
    try:
        content = manager.load([benchmark.task])
    except Exception as error:  # the network, the disk, the task's own code
        if type(error) is FileNotFoundError:  # not errors of the Hub, which are of subclasses
            advice = "check its files; paths are relative to the current directory"
        else:
            advice = "check the connection; `--suite offline` needs none"
        raise EvalError(f"the task {benchmark.task} cannot be loaded ({one_line(error)}): {advice}") from error
    tasks = list(content["tasks"].values())
    if not tasks:
        raise EvalError(f"the task {benchmark.task} has no members in this harness")
    for task in tasks:
        shots = task.get_config("num_fewshot") or 0
        task.set_config("num_fewshot", shots if benchmark.shots is None else benchmark.shots)
    group = content.get("groups", {}).get(benchmark.task)
    if group is not None and group.has_aggregation:
        return [LoadedBenchmark(benchmark, group, tasks)]
    return [LoadedBenchmark(benchmark, task, [task]) for task in tasks]


def seed() -> None:
    """Set the seeds that the `lm_eval` command sets, so that each run has the same items in the same order."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    set_seed(DEFAULT_OTHER_SEED)
    random.seed(DEFAULT_RANDOM_SEED)
