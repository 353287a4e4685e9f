"""Training speed beside the library's own: the same steps by our trainer and model, and by transformers' Trainer and
the stock model of the same shape, in turn.

Two runs stand beside each other and make their steps in turn, so that whatever the machine does meanwhile meets both;
which one goes first alternates. A step's time includes its data and its logging; start, checkpoints and result are not
measured, nor are the first steps, in which memory is taken.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from crosshead.common.errors import RecipeError
from crosshead.evals.bench.machine import machine
from crosshead.evals.bench.models import SHAPE as LAYERS
from crosshead.evals.bench.pairs import in_turn, seconds
from crosshead.modeling.options import unknown

from .data.training_data import TrainingData, open_data
from .schema.recipe import Recipe
from .schema.sections import CheckpointOptions, DataOptions, DataSource, ModelOptions, TrainOptions, WatchOptions
from .schema.toy import write_text, write_tokenizer
from .train import train
from .trainer.models import load_tokenizer
from .trainer.progress import Progress, silent
from .trainer.stepped_trainer import Rest, StepByStep
from .trainer.training_arguments import training_arguments

LENGTH, SEQUENCES, AT_ONCE, LOG_EVERY = 512, 4, 2, 5
WARM_UPS = 3
SHAPE: dict[str, Any] = LAYERS | {"vocab_size": 8192, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    "knocking-mlp": {"knocking": {"form": "mlp"}},
    "knocking-linear": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},  # as in the paper
    "explicit": {"explicit": {}},
    "mixture": {"mixture": {"active_heads": 12, "shared_heads": 4}},
    "talking": {"talking": {}},
    "differential": {"differential": {}},
    "gating": {"gating": {}},
}
"""What is measured, by name."""


def bench_train(names: list[str], rounds: int, steps: int, progress: Progress = silent) -> dict[str, Any]:
    """Tokens a second of each case and its rival, round by round, and their ratios; of all cases if none is named."""
    for name in names:
        if name not in CASES:
            raise RecipeError(str(unknown("bench train", "case", name, list(CASES))))
    figures: dict[str, Any] = {}
    names = names or list(CASES)
    measured = rounds * steps
    with TemporaryDirectory() as scratch:
        recipe = _recipe(Path(scratch), WARM_UPS + measured + 1)
        data = open_data(recipe.data, load_tokenizer(recipe), SHAPE["vocab_size"])
        for index, name in enumerate(names):
            progress("measuring", index, len(names), name)
            taken = _in_turn(partial(_ours, recipe, name), partial(_stock, recipe, data), WARM_UPS + measured)
            speeds = [_speeds(found[WARM_UPS:], steps) for found in taken]
            figures[name] = {"mixers": CASES[name], **_figures(*speeds)}
            gc.collect()  # a trainer and its model refer to each other
    settings: dict[str, Any] = {"sequences_a_step": SEQUENCES, "at_once": AT_ONCE, "length": LENGTH}
    settings |= {"steps": steps, "rounds": rounds, "warm_ups": WARM_UPS, "logged_every": LOG_EVERY}
    settings |= {"dtype": recipe.train.dtype}
    return {"tokens_per_second": figures, "shape": SHAPE, "settings": settings, "machine": machine()}


def _in_turn(ours: Callable[[Rest], None], stock: Callable[[Rest], None], steps: int) -> list[list[float]]:
    """Seconds of each step of ours and of the stock run; the first includes the start."""
    with StepByStep(ours) as mine, StepByStep(stock) as theirs:
        found = in_turn(lambda: seconds(mine.step), lambda: seconds(theirs.step), steps)
    return [found["ours"], found["rival"]]


def _speeds(taken: list[float], steps: int) -> list[float]:
    """Tokens a second of each round of so many steps."""
    rounds = (taken[start : start + steps] for start in range(0, len(taken), steps))
    return [steps * SEQUENCES * LENGTH / sum(each) for each in rounds]


def _figures(ours: list[float], stock: list[float]) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(ours, stock, strict=True)]
    return {
        "ours": ours,
        "stock": stock,
        "median_ours": median(ours),
        "median_stock": median(stock),
        "ratios": ratios,
        "median_ratio": median(ratios),
    }


def _recipe(folder: Path, steps: int) -> Recipe:
    """Plain windows of real text, a token a byte; nothing is evaluated, and no measured step is the last one."""
    write_tokenizer(folder / "tokenizer")
    batch = SEQUENCES * LENGTH
    return Recipe(
        output=str(folder / "run"),
        model=ModelOptions(config={"model_type": "crosshead_llama", **SHAPE}, tokenizer=str(folder / "tokenizer")),
        data=DataOptions(
            (DataSource(write_text(folder / "text.jsonl"), "jsonl"),), length=LENGTH, cache=str(folder / "tokens")
        ),
        train=TrainOptions(
            learning_rate=1e-3,
            tokens=steps * batch,
            batch_tokens=batch,
            micro_batch=AT_ONCE,
            dtype="bfloat16" if torch.accelerator.is_available() else "float32",
        ),
        watch=WatchOptions(every=LOG_EVERY),
        checkpoints=CheckpointOptions(every=steps),
    )


def _ours(recipe: Recipe, name: str, rest: Rest) -> None:
    """A run from scratch."""
    ended = 0

    def note(stage: str, done: int, total: int | None, told: str = "") -> None:
        nonlocal ended
        if stage == "training" and done > ended:  # a step is told again when it is logged
            ended = done
            rest()

    with TemporaryDirectory(dir=Path(recipe.output).parent) as output:
        model = replace(recipe.model, config={**(recipe.model.config or {}), "mixers": CASES[name]})
        train(replace(recipe, output=output, model=model), note)


class _Resting(TrainerCallback):
    def __init__(self, rest: Rest) -> None:
        self._rest = rest

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One more."""
        self._rest()


def _stock(recipe: Recipe, data: TrainingData, rest: Rest) -> None:
    """The same of the library's Trainer, with the same arguments, and of its model."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    with TemporaryDirectory(dir=Path(recipe.output).parent) as output:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.float32),
            args=training_arguments(replace(recipe, output=output)),
            train_dataset=data.samples(recipe.steps * recipe.batch_size, recipe.train.seed),
            callbacks=[_Resting(rest)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def bench_train_lines(report: Mapping[str, Any]) -> list[str]:
    """The figures as a table."""
    lines = [f"{'tokens a second':16}  {'ours':>8}  {'stock':>8}  {'ratio':>6}  least to most"]
    for name, figures in report["tokens_per_second"].items():
        ratios = figures["ratios"]
        speeds = f"{figures['median_ours']:>8,.0f}  {figures['median_stock']:>8,.0f}"
        lines.append(f"{name:16}  {speeds}  {figures['median_ratio']:>6.3f}  {min(ratios):.3f} to {max(ratios):.3f}")
    return lines
