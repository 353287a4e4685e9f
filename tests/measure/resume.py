"""Checks that a training run that is killed repeatedly gives bitwise the same result as an undisturbed run.

usage: PYTHONPATH=tests python -P tests/measure/resume.py FOLDER [--kills 10] [--seed 0]

A toy model is trained for two epochs of shuffled text, with gradient accumulation, warmup, learning rate decay and
LoRA with dropout. The run is killed by SIGKILL at random moments and resumed each time, once with one process and once
with two. Then a run of two processes is stopped by SIGTERM and resumed by one. Prints one JSON document with the
number of compared and of different losses and batches; exit status 1 if any differ.
"""

import argparse
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.recipe import Recipe
from crosshead.recipes.schema.sections import LoraOptions
from crosshead.recipes.trainer.loading import initial_config, load_tokenizer
from toy_training import LORA, toy_run
from training_sessions import Run, kill_at_random

SEQUENCES = 8
"""Sequences per step."""
STOPPED = 128 + signal.SIGTERM
"""Exit status of a run that was stopped by SIGTERM."""
ANOTHER_ORDER = 1e-5
"""Maximum difference of losses that a different number of processes adds up in another order."""


def two_epochs(folder: Path, documents: int) -> Recipe:
    """A recipe that trains on all windows twice: eight sequences per step, two per micro batch."""
    recipe = toy_run(LORA, folder, documents=documents)
    sources = open_data(recipe.data, load_tokenizer(recipe), initial_config(recipe).vocab_size).sources
    batch = SEQUENCES * recipe.data.length
    train = {"batch_tokens": batch, "tokens": 2 * sum(map(len, sources)) // SEQUENCES * batch, "micro_batch": 2}
    train |= {"lora": LoraOptions(4, 8.0, 0.1), "learning_rate": 1e-3, "warmup": 4.0, "seed": 5}
    return replace(
        recipe,
        train=replace(recipe.train, **train),
        checkpoints=replace(recipe.checkpoints, every=3),
        watch=replace(recipe.watch, evaluate_every=10),
    )


def compared(whole: Run, other: Run) -> dict[str, Any]:
    """The differences of losses, weights and batches of two runs that should be equal."""
    first, second = whole.losses(), other.losses()
    return {
        "losses_compared": len(first),
        "losses_different": sum(first[step] != second.get(step) for step in first),
        "weights_equal": whole.weights() == other.weights(),
        **same_batches(whole, other),
    }


def same_batches(whole: Run, other: Run) -> dict[str, int]:
    """The number of compared steps, and of steps with different sequences."""
    first, second = whole.batches(), other.batches()
    return {
        "batches_compared": len(first),
        "batches_different": sum(first[step] != second.get(step) for step in first),
    }


def killed(recipe: Recipe, folder: Path, kills: int, processes: int, seed: int) -> dict[str, Any]:
    """Train one run that is killed `kills` times and one undisturbed run, and compare them."""
    whole, other = (Run(recipe, folder, f"{name}-{processes}") for name in ("whole", "killed"))
    whole.finish(processes)
    kill_report = kill_at_random(other, kills, recipe.steps, processes, seed)
    return {"processes": processes, "steps": recipe.steps, **kill_report, **compared(whole, other)}


def changed(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Compare a run stopped with two processes and resumed with one to an undisturbed run of one process.

    Without dropout, because each process draws its own random numbers.
    """
    recipe = replace(recipe, train=replace(recipe.train, lora=LoraOptions(4, 8.0)))
    whole, other = (Run(recipe, folder, name) for name in ("alone", "changed"))
    whole.finish()
    statuses = other.stop_after(recipe.steps // 2, signal.SIGTERM, processes=2)
    other.finish()
    first, second = whole.losses(), other.losses()
    greatest = max(abs(first[step] - second[step]) for step in first)
    return {"exit_statuses": statuses, "greatest_difference_of_losses": greatest, **same_batches(whole, other)}


def differences(report: dict[str, Any], kills: int) -> list[str]:
    """Descriptions of all failed comparisons."""
    failed = [
        f"{name} of {part['processes']} killed processes"
        for part in report["killed"]
        for name in ("losses_different", "batches_different", "steps_with_several_losses")
        if part[name]
    ]
    failed += [f"kills of {part['processes']}" for part in report["killed"] if part["kills"] != kills]
    failed += [f"weights of {part['processes']}" for part in report["killed"] if not part["weights_equal"]]
    change = report["two_processes_then_one"]
    failed += ["batches of two processes and then one"] * bool(change["batches_different"])
    failed += ["losses of two processes and then one"] * (change["greatest_difference_of_losses"] > ANOTHER_ORDER)
    failed += ["exit statuses"] * (set(change["exit_statuses"]) != {STOPPED})
    return failed


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--documents", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    recipe = two_epochs(options.folder, options.documents)
    report = {
        "killed": [killed(recipe, options.folder, options.kills, count, options.seed) for count in (1, 2)],
        "two_processes_then_one": changed(recipe, options.folder),
    }
    print(json.dumps(report, indent=2))
    if failed := differences(report, options.kills):
        raise SystemExit(f"different: {', '.join(failed)}")


if __name__ == "__main__":
    main()
