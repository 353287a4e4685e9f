"""Compares learning rates of the knocking mechanism in continued training of SmolLM2-135M.

usage: python -P tests/measure/knocking_rates.py MODEL TEXT FOLDER [--tokens 500000] [--seeds 3]

MODEL and TEXT are as in recovery.py. `knocking` starts with the outputs of the source, and is trained by its shipped
recipe with a learning rate of 1, 3 and 10 times that of the other weights. The plain source is trained in the same
way. After each training, the results are written to FOLDER/knocking_rates.json: held-out losses, their differences
from the plain model with the same seed, and the drift of the mechanism from its initial values. The same command
resumes an interrupted run.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from recovery import prepare, recipe
from transformers.utils.logging import disable_progress_bar

import crosshead
from crosshead.evals.bench.machine import machine
from crosshead.recipes.schema.recipe import Recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.metrics import MetricsFile

RATES = (1, 3, 10)
"""Learning rates of the mechanism, as multiples of the model's."""
PLAIN = "plain"
CASES = (PLAIN, *(f"{rate} x" for rate in RATES))
STEPS = 120
"""Approximate number of steps per run: with fewer tokens per step, the model learns more."""
LENGTH = 512
"""Tokens per sequence."""


def run(folder: Path, case: str, seed: int, tokens: int) -> Recipe:
    """The recipe that trains one case with one seed."""
    shipped = recipe(folder, "knocking", tokens, []).train
    batch = max(LENGTH, tokens // STEPS // LENGTH * LENGTH)
    rate = shipped.learning_rate * (batch / shipped.batch_tokens) ** 0.5
    changes: dict[str, Any] = {
        "output": folder / "runs" / f"{case.replace(' ', '')}-{seed}",
        "model.path": folder / ("source" if case == PLAIN else "knocking"),
        "train.batch_tokens": batch,
        "train.micro_batch": next(size for size in (8, 4, 2, 1) if batch // LENGTH % size == 0),
        "train.learning_rate": rate,
        "train.seed": seed,
        "checkpoints.every": tokens // batch + 1,
    }
    if case != PLAIN:
        changes["train.mechanisms.learning_rate"] = rate * float(case.split()[0])
    return recipe(folder, "knocking", tokens, [f"{key}={value}" for key, value in changes.items()])


def trained(folder: Path, case: str, seed: int, tokens: int) -> dict[str, float]:
    """Train one case, and return its final held-out loss and the drift of the mechanism."""
    recipe_of_run = run(folder, case, seed, tokens)
    if train(recipe_of_run).model is None:
        raise SystemExit("stopped: the same command goes on")
    lines = MetricsFile.lines(Path(recipe_of_run.output))
    metrics = {key: line[key] for line in lines for key in ("eval_loss", "drift/knocking") if key in line}
    return {"loss": metrics["eval_loss"], "drift": metrics.get("drift/knocking", 0.0)}


def report(results: dict[str, dict[int, dict[str, float]]], settings: dict[str, Any]) -> dict[str, Any]:
    """The results: means and standard deviations over seeds, from case -> seed -> loss and drift."""
    figures = {}
    for case, seeds in results.items():
        differences = [result["loss"] - results[PLAIN][seed]["loss"] for seed, result in seeds.items()]
        figures[case] = {"losses": {seed: result["loss"] for seed, result in seeds.items()}}
        figures[case] |= {
            "beside_plain": mean(differences),
            "spread_beside": stdev(differences) if len(differences) > 1 else None,
        }
        figures[case] |= {"drift": mean(result["drift"] for result in seeds.values())}
    return {"cases": figures, **settings, "machine": machine()}


def main() -> None:
    """Train all cases that are not trained yet, seed by seed, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=500_000, help="number of training tokens of each case")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    disable_progress_bar()
    prepare(options.model, options.text, options.folder, [])
    if not (options.folder / "knocking").exists():
        crosshead.convert(options.folder / "source", options.folder / "knocking", {"knocking": {}}, dtype="float32")
    first = run(options.folder, PLAIN, 0, options.tokens).train
    settings = {"tokens": options.tokens, "learning_rate": first.learning_rate, "tokens_a_step": first.batch_tokens}
    settings |= {"dtype": first.dtype, "text": options.text.name}
    results: dict[str, dict[int, dict[str, float]]] = {}
    for seed in range(options.seeds):
        for case in CASES:
            result = trained(options.folder, case, seed, options.tokens)
            results.setdefault(case, {})[seed] = result
            print(f"seed {seed}, {case}: {result['loss']:.4f}, drift {result['drift']:.4f}", flush=True)
            text = json.dumps(report(results, settings), indent=2) + "\n"
            (options.folder / "knocking_rates.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
