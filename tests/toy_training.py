"""Training runs of a second or two: shipped recipes at toy size on a little text."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file

from crosshead.recipes.schema.recipe import Recipe, load_recipe
from crosshead.recipes.schema.sections import DataSource
from crosshead.recipes.schema.toy import toy
from crosshead.recipes.train import Outcome, train

KNOCKING = "small/smollm2_knocking"
"""Full fine-tuning without a teacher."""
EXPERTS = "papers/kha_moe_a0.8b_6.6b"
"""A mixture-of-experts model, trained from scratch."""
LORA = "small/qwen3_0.6b_knocking"
MIXTURE = "small/smollm2_mixture"
"""Distillation from a teacher, enabled by `toy_run`, and a balance loss."""
SCRATCH = "papers/mea_1b"
DOCUMENT = 150
"""Length of a document in characters, each of which is a token."""

gc.freeze()  # excludes the objects of library imports from the garbage collection at the start of each run
SECTIONS = ("model", "data", "train", "distillation", "watch", "checkpoints")


class Killed(BaseException):
    """Ends a run like a kill: a BaseException that no handler of the code under test catches."""


def toy_run(
    name: str,
    folder: Path,
    steps: int = 4,
    documents: int = 30,
    given: Sequence[str] = (),
    **changes: Mapping[str, Any] | None,
) -> Recipe:
    """Return a shipped recipe at toy size for `steps` steps; `changes` are per section, None removes a section.

    `given` are command-line changes (`key=value`), applied before the recipe is shrunk.
    """
    recipe = toy(load_recipe(name, given), folder)
    _write_text(folder / "text.jsonl", range(documents))
    _write_text(folder / "held_out.jsonl", range(-6, 0))
    evaluation = DataSource(str(folder / "held_out.jsonl"), "jsonl")
    standard: dict[str, dict[str, Any]] = {
        "data": {"sources": recipe.data.sources[:1], "held_out": 0.0, "evaluation": (evaluation,)},
        "train": {"tokens": steps * recipe.train.batch_tokens},
        "checkpoints": {"every": 2},
    }
    if name == MIXTURE:
        standard["distillation"] = {"weight": 0.9, "transfer_steps": 0}
    for section in SECTIONS:
        values = standard.get(section, {}) | dict(changes.get(section) or {})
        if section in changes and changes[section] is None:
            recipe = replace(recipe, **{section: None})
        elif values:
            recipe = replace(recipe, **{section: replace(getattr(recipe, section), **values)})
    return recipe


def _write_text(path: Path, numbers: range) -> None:
    """Write documents of equal length, with these numbers, as JSON lines; the text is CPython's `pydoc_data`."""
    text = "".join(topics[topic] for topic in sorted(topics))
    documents = [
        text[number * DOCUMENT :][:DOCUMENT] for number in (number % (len(text) // DOCUMENT) for number in numbers)
    ]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")


def killed_at(step: int) -> Any:
    """Return a progress callback that kills the run after a step, before its checkpoint is written."""

    def show(stage: str, done: int, total: int | None, message: str = "") -> None:
        if stage == "training" and done == step:
            raise Killed

    return show


def killed(recipe: Recipe, step: int) -> None:
    """Start the run and kill it after a step."""
    try:
        train(recipe, killed_at(step))
    except Killed:
        return
    raise AssertionError(f"not killed after step {step}")


def resumed(recipe: Recipe, *steps: int) -> Outcome:
    """Kill the run after each of these steps, then resume it to the end; return its outcome."""
    for step in steps:
        killed(recipe, step)
    return train(recipe)


def metrics(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the parsed lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in Path(recipe.output, "metrics.jsonl").read_text().splitlines()]


def losses(recipe: Recipe) -> list[float]:
    """Return the training loss of every step."""
    return [loss for line in metrics(recipe) for loss in line.get("losses", ())]


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the tensors of the trained model."""
    return load_file(Path(recipe.output, "model", "model.safetensors"))
