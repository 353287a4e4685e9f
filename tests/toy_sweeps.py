"""The recipe of a sweep, and invented losses of its runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from crosshead.recipes.schema.recipe import load_recipe

NAME = "papers/mea_1b_sweep"
STEPS, WARMUP = 200, 10


def sweep_recipe(folder):
    """A recipe of 200 steps of 1,024 tokens with three rates, evaluated every 10 steps."""
    shipped = load_recipe(NAME, [f"output={folder}", "sweep.learning_rates=[1e-3, 1e-4, 3e-3]"])
    options = replace(shipped.train, tokens=STEPS * 1024, batch_tokens=1024, micro_batch=1, warmup=WARMUP)
    watch = replace(shipped.watch, evaluate_every=10)
    return replace(shipped, data=replace(shipped.data, length=64), train=options, watch=watch)


def losses_of(rate, noise=0.02):
    """Return the losses of a noisy curve that ends lower for a larger rate."""
    steps = np.arange(1, STEPS + 1)
    values = (20 / steps) ** (0.3 + 100 * rate) + 2 + noise * np.random.default_rng(0).standard_normal(STEPS)
    return values.tolist()


def write_metrics(run, losses, evaluate_every=10):
    """Write the metrics file of a run with these losses."""
    folder = Path(run.output)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": len(losses), "losses": losses}]
    steps = range(evaluate_every, len(losses) + 1, evaluate_every)
    lines += [{"step": step, "eval_loss": losses[step - 1] + 0.5} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
