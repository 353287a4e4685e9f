"""Checks that a training step is the same for each division into micro batches and among processes.

usage: PYTHONPATH=tests python -P tests/measure/processes.py FOLDER [--steps 50]

Each toy model is trained three times with the same steps of eight sequences: by one process in one micro batch, by two
processes with four sequences each, and by one process in two micro batches of four. The first model has `mixture` with
its balance loss, a teacher, and matched attention in the first steps. The second has separate documents, so that
sequences predict different numbers of tokens. The third, a BERT with `mixture`, learns masked tokens and the order of
segments. Prints one JSON document with the maximum difference of the losses of any step; exit status 1 if it is above
1e-5.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from crosshead.recipes.schema.recipe import Recipe
from toy_training import KNOCKING, MIXTURE, toy_run
from training_sessions import Run

BERT = "small/bert_mixture"
NO_DROPOUT = (f"model.config.{name}_dropout_prob=0" for name in ("hidden", "attention_probs"))
ORDER = ("objective.segments=order", *NO_DROPOUT)
DIVISIONS = {"1 x 8": (1, 8), "2 x 4": (2, 4), "1 x 2 x 4": (1, 4)}
"""Name -> number of processes, and sequences per micro batch."""
ALLOWED = 1e-5
"""Maximum difference between the losses of a step."""
BALANCE_WEIGHT = 0.5  # as large as the other losses, so that counting it twice or per process would be noticed


def recipes(folder: Path, steps: int) -> dict[str, Recipe]:
    """Name -> recipe of each model."""
    mixture = toy_run(MIXTURE, folder / "mixture", documents=100)
    config = dict(mixture.model.config or {})
    options = config["mixers"]["mixture"] | {"balance_weight": BALANCE_WEIGHT}
    length = mixture.data.length
    train = {"batch_tokens": 8 * length, "tokens": steps * 8 * length, "warmup": 5.0, "seed": 3}
    return {
        "mixture": toy_run(
            MIXTURE,
            folder / "mixture",
            documents=100,
            model={"path": None, "config": config | {"mixers": {"mixture": options}}},
            train=train,
            distillation={"match_steps": 5},
        ),
        "documents apart": toy_run(
            KNOCKING, folder / "apart", documents=100, data={"separate_documents": True}, train=train
        ),
        "order of segments": toy_run(BERT, folder / "order", documents=100, given=ORDER, train=train),
    }


def compared(recipe: Recipe, folder: Path, name: str) -> dict[str, Any]:
    """Train with all divisions; return the differences of their losses from the first division."""
    folder.mkdir(parents=True, exist_ok=True)
    losses: dict[str, dict[int, float]] = {}
    held_out: dict[str, dict[int, float]] = {}
    for division, (processes, at_once) in DIVISIONS.items():
        run = Run(recipe, folder, f"{name}-{processes}-{at_once}".replace(" ", "-"))
        run.finish(processes, f"train.micro_batch={at_once}")
        losses[division] = run.losses()
        held_out[division] = {line["step"]: line["eval_loss"] for line in run.metrics() if "eval_loss" in line}
    return {
        "steps": recipe.steps,
        "greatest_difference_of_losses": differences(losses),
        "greatest_difference_of_held_out_losses": differences(held_out),
    }


def differences(losses: dict[str, dict[int, float]]) -> dict[str, float]:
    """Division -> maximum difference of its losses from those of the first division."""
    first, *others = losses.values()
    greatest = [max(abs(loss - other[step]) for step, loss in first.items()) for other in others]
    return dict(zip([*losses][1:], greatest, strict=True))


def main() -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    named_recipes = recipes(options.folder, options.steps).items()
    report = {name: compared(recipe, options.folder / "runs", name) for name, recipe in named_recipes}
    print(json.dumps(report, indent=2))
    if different(report):
        raise SystemExit(f"different: {', '.join(different(report))}")


def different(report: dict[str, Any]) -> list[str]:
    """Models and divisions with losses of the same step that differ by more than ALLOWED or are NaN."""
    return [
        f"{name}, {division}"
        for name, results in report.items()
        for key in ("greatest_difference_of_losses", "greatest_difference_of_held_out_losses")
        for division, difference in results[key].items()
        if not difference <= ALLOWED
    ]


if __name__ == "__main__":
    main()
