"""The tasks of a suite, found in the installed harness, in this package or in a user's folder, and their data."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import EvalError, nearest, one_line

from .suite import Benchmark

TASKS = Path(__file__).parents[1] / "tasks"
"""The offline tasks; plain lm_eval takes it as `--include_path`."""


@dataclass(frozen=True)
class Loaded:
    """A benchmark whose data is there."""

    benchmark: Benchmark
    task: Any
    """The harness's task, or its group of tasks."""
    members: list[Any]
    """The task alone, or all of the group's."""

    @property
    def is_group(self) -> bool:
        """Whether the harness averages over members."""
        return self.task is not self.members[0]


def task_manager(benchmarks: Sequence[Benchmark], include_path: Path | None) -> Any:
    """The harness's index of tasks. That of its own thousands takes long, and is made only where it is needed."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise EvalError(f"--include-path {include_path} is no folder: give the one with the YAML files of your tasks")
    paths = [str(path) for path in (TASKS, include_path) if path is not None]
    own = TaskManager(include_path=paths, include_defaults=False)
    if all(benchmark.task in own.all_subtasks for benchmark in benchmarks):  # a group may hold the harness's tasks
        return own
    return TaskManager(include_path=paths)


def load_tasks(manager: Any, benchmarks: Sequence[Benchmark], run_code: bool) -> list[Loaded]:
    """Fetch the data of all, after a look at their names; `run_code` allows those that run what a model writes."""
    _check_names(manager, [benchmark.task for benchmark in benchmarks])
    if run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # which the metric wants as well
    else:  # the code of such a task may refuse to be loaded, and a group shows its tasks only afterwards
        entries = [manager.task_index[each.task] for each in benchmarks]
        _refuse_code([entry.name for entry in entries if (entry.cfg or {}).get("unsafe_code")])
    found = [loaded for benchmark in benchmarks for loaded in _load(manager, benchmark)]
    members = [task for loaded in found for task in loaded.members]
    if not run_code:
        _refuse_code([task.task_name for task in members if getattr(task, "UNSAFE_CODE", False)])
    names = [task.task_name for task in members]
    for name in names:
        if names.count(name) > 1:
            raise EvalError(f"the task {name} is asked for twice, alone or in a group: leave one of them out")
    return found


def _refuse_code(tasks: Sequence[str]) -> None:
    if tasks:
        raise EvalError(
            f"{', '.join(tasks)} would run, on this machine, code that the model writes: allow it with "
            "--confirm-run-unsafe-code, or choose other tasks with --tasks"
        )


def seed() -> None:
    """What the harness's own command does before it begins: the same items, in the same order, in every run."""
    import numpy
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    numpy.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


def _check_names(manager: Any, names: Sequence[str]) -> None:
    known = manager.all_tasks
    for name in names:
        if name not in known:
            raise EvalError(f"there is no task {name!r}{nearest(name, known) or ': `lm_eval ls tasks` lists them'}")


def _load(manager: Any, benchmark: Benchmark) -> list[Loaded]:
    """One, or those that a tag stands for."""
    seed()  # some tasks shuffle the choices
    try:
        found = manager.load([benchmark.task])
    except Exception as error:  # the network, the disk, the task's own code
        raise EvalError(
            f"the task {benchmark.task} cannot be loaded ({one_line(error)}): check the connection; "
            "`--suite offline` needs none"
        ) from error
    tasks = list(found["tasks"].values())
    if not tasks:
        raise EvalError(f"the task {benchmark.task} has no members in this harness")
    for task in tasks:
        own = task.get_config("num_fewshot") or 0
        task.set_config("num_fewshot", own if benchmark.shots is None else benchmark.shots)
    group = found.get("groups", {}).get(benchmark.task)
    if group is not None and group.has_aggregation:
        return [Loaded(benchmark, group, tasks)]
    return [Loaded(benchmark, task, [task]) for task in tasks]
