"""Training runs as processes of their own, alone or several together, to be stopped or killed at any moment."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from crosshead.recipes.schema.recipe import Recipe

WORKER = Path(__file__).with_name("training_worker.py")
LONGEST = 900
LATEST = 0.5
"""Seconds behind a step in which a run is killed: several of a toy's steps, with checkpoints."""


class Run:
    """A recipe in a folder of its own: any number of sessions, one after the other."""

    def __init__(self, recipe: Recipe, folder: Path, name: str) -> None:
        self.output, self._records, self._log = folder / name, folder / f"{name}-records", folder / f"{name}.log"
        self._recipe = folder / f"{name}.yaml"
        write_recipe(recipe, self._recipe, self.output)
        self._records.mkdir()

    def start(self, processes: int = 1, *changes: str) -> list[subprocess.Popen[bytes]]:
        """A session."""
        command = [sys.executable, "-P", str(WORKER), str(self._records), "train", str(self._recipe)]
        command += [part for change in changes for part in ("--set", change)]
        shared = {"PYTHONPATH": str(WORKER.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if processes > 1:
            shared |= group_variables(processes)
        started = []
        for rank in range(processes):
            own = rank_variables(rank) if processes > 1 else {}
            with self._log.open("ab") as log:
                started.append(subprocess.Popen(command, env=os.environ | shared | own, stdout=log, stderr=log))
        return started

    def finish(self, processes: int = 1, *changes: str) -> None:
        """A session to the end of the run."""
        statuses = self.end(processes, *changes)
        if any(statuses):
            raise RuntimeError(f"exit statuses {statuses}:\n{self.told()[-3000:]}")

    def end(self, processes: int = 1, *changes: str) -> list[int]:
        """A session, however it ends; returns the exit statuses."""
        return _statuses(self.start(processes, *changes))

    def told(self) -> str:
        """What all sessions have printed."""
        return self._log.read_text()

    def kill_behind(self, step: int, delay: float, processes: int = 1) -> bool:
        """A session that is killed so many seconds behind a step; False where it was done before."""
        started = self.start(processes)
        self._await(step, started)
        time.sleep(delay)
        for process in started:
            process.send_signal(signal.SIGKILL)
        return set(_statuses(started)) != {0}

    def stop_behind(self, step: int, number: signal.Signals, processes: int = 1) -> list[int]:
        """A session of which one process is asked to stop behind a step; returns the exit statuses."""
        started = self.start(processes)
        self._await(step, started)
        started[-1].send_signal(number)
        return _statuses(started)

    def _await(self, step: int, started: list[subprocess.Popen[bytes]]) -> None:
        """Until this session has that step behind it."""
        record, deadline = self._records / f"0-{started[0].pid}", time.monotonic() + LONGEST
        while all(process.poll() is None for process in started):
            lines = record.read_text().splitlines() if record.exists() else []
            if lines and int(lines[-1].split()[0]) >= step:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {step} was never reached:\n{self.told()[-3000:]}")
            time.sleep(0.01)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines that are complete."""
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """By step, from 1; each step must have one."""
        found: dict[int, float] = {}
        for line in self.metrics():
            for step, loss in enumerate(line.get("losses", ()), line["step"] - len(line.get("losses", ())) + 1):
                if step in found:
                    raise RuntimeError(f"step {step} stands twice in the metrics")
                found[step] = loss
        return found

    def weights(self) -> bytes:
        """Those of the result."""
        return (self.output / "model" / "model.safetensors").read_bytes()

    def batches(self) -> dict[int, set[str]]:
        """What the sequences of each step were, whoever trained on them, however often."""
        found: dict[int, set[str]] = defaultdict(set)
        for file in self._records.iterdir():
            for line in file.read_text().splitlines():
                step, *rows = line.split()
                found[int(step)] |= set(rows)
        return dict(found)


def kill_at_random(run: Run, kills: int, steps: int, processes: int, seed: int) -> dict[str, int]:
    """Kill a run at random moments all over it, going on each time, and finish it; says how it went."""
    chance, killed = random.Random(seed), 0
    seen: dict[int, set[float]] = defaultdict(set)
    for step in sorted(chance.sample(range(1, steps), kills)):
        killed += run.kill_behind(step, chance.uniform(0, LATEST), processes)
        for done, loss in run.losses().items():
            seen[done].add(loss)
    run.finish(processes)
    for done, loss in run.losses().items():
        seen[done].add(loss)
    return {"kills": killed, "steps_with_several_losses": sum(len(found) > 1 for found in seen.values())}


def write_recipe(recipe: Recipe, path: Path, output: Path) -> None:
    """A recipe's file, with another output."""
    content = json.loads(json.dumps(asdict(recipe) | {"output": str(output)}))
    path.write_text(yaml.safe_dump(without_nothing(content)))


def without_nothing(content: Any) -> Any:
    """A recipe's content as its file may have it."""
    if isinstance(content, dict):
        return {key: without_nothing(value) for key, value in content.items() if value is not None}
    return content


def _statuses(started: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=LONGEST) for process in started]


def group_variables(processes: int) -> dict[str, str]:
    """The environment variables by which so many processes on this machine find each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    count = str(processes)
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}


def rank_variables(rank: int) -> dict[str, str]:
    """The environment variables of one of them."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
