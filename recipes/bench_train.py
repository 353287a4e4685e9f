"""Benchmark of training speed: our trainer and model against transformers' Trainer and the stock model.

Both models have the same sizes. Each round trains both for a few steps, in alternating order, so that other load on
the machine affects both. The time of a step includes its data loading and logging, but no startup, checkpoint or
saving of the model. The first steps, which allocate memory, are warm-ups and not counted.
"""

import gc
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PrinterCallback

from crosshead.common.errors import RecipeError
from crosshead.common.progress import Progress, silent
from crosshead.evals.bench.machine import machine
from crosshead.evals.bench.models import SHAPE as LAYERS
from crosshead.evals.bench.pairs import measure_alternating
from crosshead.modeling.options import unknown

from .data.training_data import TrainingData, open_data
from .schema.recipe import Recipe
from .schema.sections import CheckpointOptions, DataOptions, DataSource, ModelOptions, TrainOptions, WatchOptions
from .schema.toy import write_text, write_tokenizer
from .train import train
from .trainer.callbacks import ReportProgress
from .trainer.loading import load_tokenizer
from .trainer.training_arguments import training_arguments

LENGTH, SEQUENCES, MICRO_BATCH, LOG_EVERY = 512, 4, 2, 5
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
"""Case name -> `mixers` of the model."""
FIGURES = ("ours", "stock", "median_ours", "median_stock", "ratios", "median_ratio")
"""Figures of a case in the report: tokens per second, and their ratios."""


def bench_train(names: list[str], rounds: int, steps: int, progress: Progress = silent) -> dict[str, Any]:
    """Measure tokens per second of each case and of the stock run, per round, and their ratios; return the report.

    `names` are keys of `CASES`; an empty list stands for all cases.
    """
    for name in names:
        if name not in CASES:
            raise RecipeError(str(unknown("bench train", "case", name, list(CASES))))
    speeds: dict[str, Any] = {}
    names = names or list(CASES)
    with TemporaryDirectory() as scratch:
        recipe = _recipe(Path(scratch), WARM_UPS + steps + 1)
        data = open_data(recipe.data, load_tokenizer(recipe), SHAPE["vocab_size"])
        for index, name in enumerate(names):
            progress("measuring", index, len(names), name)
            ours, stock = partial(_train_ours, recipe, name), partial(_train_stock, recipe, data)
            measured = measure_alternating(partial(_speed, ours, steps), partial(_speed, stock, steps), rounds)
            figures = {key: measured[key.replace("stock", "baseline")] for key in FIGURES}
            speeds[name] = {"mixers": CASES[name], **figures}
    settings: dict[str, Any] = {"sequences_a_step": SEQUENCES, "at_once": MICRO_BATCH, "length": LENGTH}
    settings |= {"steps": steps, "rounds": rounds, "warm_ups": WARM_UPS, "logged_every": LOG_EVERY}
    settings |= {"dtype": recipe.train.dtype}
    return {"tokens_per_second": speeds, "shape": SHAPE, "settings": settings, "machine": machine()}


def _speed(run: Callable[[Progress], object], steps: int) -> float:
    """Return the tokens per second of a run, over `steps` steps after the warm-ups."""
    ends: dict[int, float] = {}

    def show(stage: str, done: int, total: int | None, message: str = "") -> None:
        if stage == "training" and done not in ends:  # a logged step is reported twice
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            ends[done] = time.perf_counter()

    run(show)
    gc.collect()  # a trainer and its model are a reference cycle
    return steps * SEQUENCES * LENGTH / (ends[WARM_UPS + steps] - ends[WARM_UPS])


def _recipe(folder: Path, steps: int) -> Recipe:
    """Return the benchmark's recipe: byte-level tokens of real text, and no evaluation.

    `steps` counts the warm-ups, the measured steps, and one more: the last step, which saves, is not measured.
    """
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
            micro_batch=MICRO_BATCH,
            dtype="bfloat16" if torch.cuda.is_available() else "float32",
        ),
        watch=WatchOptions(every=LOG_EVERY),
        checkpoints=CheckpointOptions(every=steps),
    )


def _train_ours(recipe: Recipe, name: str, progress: Progress) -> None:
    """Train the case `name` from scratch with our trainer."""
    with TemporaryDirectory(dir=Path(recipe.output).parent) as output:
        model = replace(recipe.model, config={**(recipe.model.config or {}), "mixers": CASES[name]})
        outcome = train(replace(recipe, output=output, model=model), progress)
    if outcome.stopped_by is not None:
        signal.raise_signal(outcome.stopped_by)  # `train` has returned early: stop the benchmark, too
        raise KeyboardInterrupt  # also where the signal is ignored outside of `train`, as in background jobs


def _train_stock(recipe: Recipe, data: TrainingData, progress: Progress) -> None:
    """Train the stock Llama with transformers' Trainer and the same arguments."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    with TemporaryDirectory(dir=Path(recipe.output).parent) as output:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.float32),
            args=training_arguments(replace(recipe, output=output)),
            train_dataset=data.samples(recipe.steps * recipe.batch_size, recipe.train.seed),
            callbacks=[ReportProgress(progress, recipe.per_step)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def bench_train_lines(report: Mapping[str, Any]) -> list[str]:
    """Format the report of `bench_train` as the lines of a table."""
    lines = [f"{'tokens a second':16}  {'ours':>8}  {'stock':>8}  {'ratio':>6}  lowest to highest"]
    for name, figures in report["tokens_per_second"].items():
        ratios = figures["ratios"]
        speeds = f"{figures['median_ours']:>8,.0f}  {figures['median_stock']:>8,.0f}"
        lines.append(f"{name:16}  {speeds}  {figures['median_ratio']:>6.3f}  {min(ratios):.3f} to {max(ratios):.3f}")
    return lines
