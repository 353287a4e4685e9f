"""Training runs in subprocesses, with one or several ranks, that tests can stop or kill at any step."""

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
"""Maximum delay in seconds between a step and the kill: several steps of a toy, with their checkpoints."""


class Run:
    """A training run of a recipe in its own folder; its sessions (starts and resumes) run one after the other."""

    def __init__(self, recipe: Recipe, folder: Path, name: str) -> None:
        self.output, self._records, self._log = folder / name, folder / f"{name}-records", folder / f"{name}.log"
        self._recipe = folder / f"{name}.yaml"
        write_recipe(recipe, self._recipe, self.output)
        self._records.mkdir()

    def start(self, processes: int = 1, *changes: str) -> list[subprocess.Popen[bytes]]:
        """Start a session with one subprocess per rank; return the subprocesses."""
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
        """Run a session to the end of training; raise RuntimeError if a process fails."""
        statuses = self.end(processes, *changes)
        if any(statuses):
            raise RuntimeError(f"exit statuses {statuses}:\n{self.log_text()[-3000:]}")

    def end(self, processes: int = 1, *changes: str) -> list[int]:
        """Run a session until it ends for any reason; return the exit statuses."""
        return _statuses(self.start(processes, *changes))

    def log_text(self) -> str:
        """Return the combined log (stdout and stderr) of all sessions."""
        return self._log.read_text()

    def kill_after(self, step: int, delay: float, processes: int = 1) -> bool:
        """Run a session, kill it `delay` seconds after a step; return False if it finished before."""
        started = self.start(processes)
        self._await(step, started)
        time.sleep(delay)
        for process in started:
            process.send_signal(signal.SIGKILL)
        return set(_statuses(started)) != {0}

    def stop_after(self, step: int, number: signal.Signals, processes: int = 1) -> list[int]:
        """Run a session, send a signal to its last rank after a step; return the exit statuses."""
        started = self.start(processes)
        self._await(step, started)
        started[-1].send_signal(number)
        return _statuses(started)

    def _await(self, step: int, started: list[subprocess.Popen[bytes]]) -> None:
        """Wait until this session has reached a step or a process has ended."""
        record, deadline = self._records / f"0-{started[0].pid}", time.monotonic() + LONGEST
        while all(process.poll() is None for process in started):
            lines = record.read_text().splitlines() if record.exists() else []
            if lines and int(lines[-1].split()[0]) >= step:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {step} was never reached:\n{self.log_text()[-3000:]}")
            time.sleep(0.01)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the parsed complete lines of metrics.jsonl."""
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, counted from 1; raise RuntimeError if a step occurs twice."""
        losses: dict[int, float] = {}
        for line in self.metrics():
            for step, loss in enumerate(line.get("losses", ()), line["step"] - len(line.get("losses", ())) + 1):
                if step in losses:
                    raise RuntimeError(f"step {step} occurs twice in the metrics")
                losses[step] = loss
        return losses

    def weights(self) -> bytes:
        """Return the bytes of the trained model.safetensors."""
        return (self.output / "model" / "model.safetensors").read_bytes()

    def batches(self) -> dict[int, set[str]]:
        """Return the digests of the sequences of each step (from 0), merged over ranks and repeated steps."""
        digests: dict[int, set[str]] = defaultdict(set)
        for file in self._records.iterdir():
            for line in file.read_text().splitlines():
                step, *rows = line.split()
                digests[int(step)] |= set(rows)
        return dict(digests)


def kill_at_random(run: Run, kills: int, steps: int, processes: int, seed: int) -> dict[str, int]:
    """Kill a run at random steps, resume it each time, finish it; return counts of kills and of differing losses."""
    generator, killed = random.Random(seed), 0
    losses_by_step: dict[int, set[float]] = defaultdict(set)
    for step in sorted(generator.sample(range(1, steps), kills)):
        killed += run.kill_after(step, generator.uniform(0, LATEST), processes)
        for done, loss in run.losses().items():
            losses_by_step[done].add(loss)
    run.finish(processes)
    for done, loss in run.losses().items():
        losses_by_step[done].add(loss)
    return {"kills": killed, "steps_with_several_losses": sum(len(losses) > 1 for losses in losses_by_step.values())}


def write_recipe(recipe: Recipe, path: Path, output: Path) -> None:
    """Write a recipe as YAML, with another output."""
    content = json.loads(json.dumps(asdict(recipe) | {"output": str(output)}))
    path.write_text(yaml.safe_dump(without_nothing(content)))


def without_nothing(content: Any) -> Any:
    """Return the content without None values, which recipe files do not allow."""
    if isinstance(content, dict):
        return {key: without_nothing(value) for key, value in content.items() if value is not None}
    return content


def _statuses(started: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=LONGEST) for process in started]


def group_variables(processes: int) -> dict[str, str]:
    """Return the environment variables by which the ranks on this machine find each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    count = str(processes)
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}


def rank_variables(rank: int) -> dict[str, str]:
    """Return the environment variables of one rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
