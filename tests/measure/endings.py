"""Checks that two processes of a training run exit cleanly, without an abort, also on a busy machine.

usage: PYTHONPATH=tests python -P tests/measure/endings.py FOLDER [--ends 100] [--load 4]

Each of the `--ends` runs is `crosshead train` on a model of toy size, in two processes. They are forked from a process
that has imported the libraries, so that most of their time is the exit; `--load` other processes keep the CPU busy. An
abort is rare: it needs a gloo thread that is active while the interpreter shuts down. So each process also lists the
threads of its process group (gloo, TCPStore) that are alive at exit. Prints one JSON document; exit status 1 if a
process failed or a thread was alive.
"""

import argparse
import atexit
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crosshead.recipes.train  # noqa: F401  # imported before the forks, with all dependencies
from crosshead.recipes.schema.recipe import Recipe
from crosshead_command.main import main as crosshead_main
from toy_training import KNOCKING, toy_run
from training_sessions import group_variables, rank_variables, write_recipe

PROCESSES = 2
TASKS = Path("/proc/self/task")
OF_THE_GROUP = ("gloo", "tcpstore")
"""Parts of the names of the threads that a torch process group starts."""


def short_run(folder: Path) -> Recipe:
    """A recipe with two steps, an evaluation and a saved model."""
    return toy_run(KNOCKING, folder, steps=2, documents=20, train={"micro_batch": 1}, checkpoints={"every": 100})


def end_together(recipe: Recipe, folder: Path) -> tuple[list[int], list[str]]:
    """Run the training; return the exit statuses of its processes, and the names of threads alive at their exit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_recipe(recipe, folder / "recipe.yaml", folder / "output")
    shared, children = group_variables(PROCESSES), []
    for rank in range(PROCESSES):
        child = os.fork()
        if child == 0:
            train_in_fork(folder, rank, shared)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    threads = [name for file in folder.glob("threads-*") for name in json.loads(file.read_text())]
    return statuses, threads


def train_in_fork(folder: Path, rank: int, shared: dict[str, str]) -> None:
    """Run the command in a child. SystemExit propagates, so that the interpreter shuts down as after the command."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.environ.update(shared | rank_variables(rank))
    atexit.register(list_threads, folder / f"threads-{rank}")
    sys.argv = ["crosshead", "train", str(folder / "recipe.yaml")]
    crosshead_main()


def list_threads(path: Path) -> None:
    """Write the names of the process group's threads that are alive to a JSON file."""
    names = [(task / "comm").read_text().strip() for task in TASKS.iterdir()]
    path.write_text(json.dumps([name for name in names if any(part in name for part in OF_THE_GROUP)]))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the CPU busy with `processes` processes inside the block; forked children do not end them."""
    parent = os.getpid()
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        if os.getpid() == parent:
            for process in load:
                process.kill()
                process.wait()


def measure(folder: Path, ends: int, load: int) -> dict[str, Any]:
    """Run the training `ends` times; return the counts of exit statuses and of threads alive at exit."""
    recipe = short_run(folder / "toy")
    statuses: Counter[int] = Counter()
    threads_left: Counter[str] = Counter()
    with busy(load):
        for number in range(ends):
            exits, threads = end_together(recipe, folder / "run")
            statuses.update(exits)
            threads_left.update(threads)
            if any(exits):
                shutil.copyfile(folder / "run" / "log", folder / f"failed-{number}.log")
            print(f"{number + 1} of {ends}: exit statuses {exits}", file=sys.stderr, flush=True)
    return {"ends": ends, "load": load, "exit_statuses": dict(statuses), "threads_left": dict(threads_left)}


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ends", type=int, default=100)
    parser.add_argument("--load", type=int, default=4)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    report = measure(options.folder, options.ends, options.load)
    print(json.dumps(report, indent=2))
    if set(report["exit_statuses"]) != {0} or report["threads_left"]:
        raise SystemExit("not every process ended as it should")


if __name__ == "__main__":
    main()
