"""Training speed beside the library's own: the same steps by our trainer and model, and by transformers' Trainer and
the stock model of the same shape, in turn.

A run is timed from the end of its first step to the end of its last: steps, their data and their logging, without
start, checkpoints and result. A ratio is that of two runs that follow each other; which one goes first alternates.
"""

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from crosshead.evals.bench_machine import machine
from crosshead.modeling.options import unknown

from .data_options import DataOptions, DataSource
from .errors import RecipeError
from .models import load_tokenizer
from .schema import CheckpointOptions, ModelOptions, Recipe, TrainOptions, WatchOptions
from .telling import Progress, silent
from .toy import write_text, write_tokenizer
from .train import train
from .training_arguments import training_arguments
from .training_data import TrainingData, open_data

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LENGTH, SEQUENCES, AT_ONCE, LOG_EVERY = 512, 4, 2, 5
CASES: dict[str, dict[str, Any]] = {
    "knocking-mlp": {"knocking": {"form": "mlp"}},
    "knocking-linear": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},  # as in the paper
    "explicit": {"explicit": {}},
    "mixture": {"mixture": {"active_heads": 6, "shared_heads": 2}},
    "talking": {"talking": {}},
    "differential": {"differential": {}},
}
"""What is measured, by name."""


def bench_train(names: list[str], rounds: int, steps: int, progress: Progress = silent) -> dict[str, Any]:
    """Tokens a second of each case and of its rival, run by run, and their ratios; of all cases if none is named."""
    for name in names:
        if name not in CASES:
            raise RecipeError(str(unknown("bench train", "case", name, list(CASES))))
    names = names or list(CASES)
    found: dict[str, dict[str, list[float]]] = {name: {"ours": [], "stock": []} for name in names}
    runs, done = 2 * rounds * len(names), 0
    with TemporaryDirectory() as scratch:
        recipe = _recipe(Path(scratch), steps)
        data = open_data(recipe.data, load_tokenizer(recipe), SHAPE["vocab_size"])
        for turn in range(rounds):
            for name in names:
                for side in ("ours", "stock") if turn % 2 else ("stock", "ours"):
                    progress("measuring", done, runs, f"{name}, {side}")
                    seconds = _ours(recipe, name) if side == "ours" else _stock(recipe, data)
                    found[name][side].append((steps - 1) * SEQUENCES * LENGTH / seconds)
                    done += 1
    settings: dict[str, Any] = {"sequences_a_step": SEQUENCES, "at_once": AT_ONCE, "length": LENGTH}
    settings |= {"steps": steps, "rounds": rounds, "logged_every": LOG_EVERY, "dtype": recipe.train.dtype}
    figures = {name: {"mixers": CASES[name], **_figures(**speeds)} for name, speeds in found.items()}
    return {"tokens_per_second": figures, "shape": SHAPE, "settings": settings, "machine": machine()}


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
    """Plain windows of real text, a token a byte; nothing is evaluated, and nothing saved before the end."""
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


def _ours(recipe: Recipe, name: str) -> float:
    """Seconds between the first and the last step of a run from scratch."""
    ends: dict[int, float] = {}

    def note(stage: str, done: int, total: int | None, told: str = "") -> None:
        if stage == "training":
            ends.setdefault(done, time.perf_counter())

    with TemporaryDirectory(dir=Path(recipe.output).parent) as output:
        model = replace(recipe.model, config={**(recipe.model.config or {}), "mixers": CASES[name]})
        if train(replace(recipe, output=output, model=model), note).model is None:
            raise KeyboardInterrupt  # the run ends well when it is told to stop; so must the measurement
    gc.collect()  # a trainer and its model refer to each other
    return ends[recipe.steps] - ends[1]


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One more."""
        self.ends[state.global_step] = time.perf_counter()


def _stock(recipe: Recipe, data: TrainingData) -> float:
    """The same of the library's Trainer, with the same arguments, and of its model."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    clock = _Clock()
    with TemporaryDirectory(dir=Path(recipe.output).parent) as output:
        arguments = training_arguments(replace(recipe, output=output))
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.float32),
            args=arguments,
            train_dataset=data.samples(recipe.steps * recipe.batch_size, recipe.train.seed),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    del trainer
    gc.collect()
    return clock.ends[recipe.steps] - clock.ends[1]


def bench_train_lines(report: Mapping[str, Any]) -> list[str]:
    """The figures as a table."""
    lines = [f"{'tokens a second':16}  {'ours':>8}  {'stock':>8}  {'ratio':>6}  least to most"]
    for name, figures in report["tokens_per_second"].items():
        ratios = figures["ratios"]
        speeds = f"{figures['median_ours']:>8,.0f}  {figures['median_stock']:>8,.0f}"
        lines.append(f"{name:16}  {speeds}  {figures['median_ratio']:>6.3f}  {min(ratios):.3f} to {max(ratios):.3f}")
    return lines
