"""Makes the demo's models: conversions of the source, and a short training of one of them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosshead.common.progress import Progress
from crosshead.conversion.calibration.head_statistics import fast_dtype
from crosshead.conversion.options import split_argument
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.train import train

ROUTED = 75
"""Percentage of the query heads that `mixture` keeps active."""
CACHED = 2 / 3
"""Number of component heads of `explicit` per key/value head."""


@dataclass(frozen=True)
class Conversion:
    """One way to convert the source."""

    name: str
    message: str
    mixer: str
    """Mechanism and options in the form of `crosshead convert --mixer`."""
    calibrated: bool = True
    """True if the conversion reads a calibration text."""

    @property
    def mixers(self) -> dict[str, Any]:
        """Mechanism -> options, the argument of `crosshead.convert`."""
        return dict([split_argument(self.mixer)])


@dataclass(frozen=True)
class Training:
    """Settings of the demo's training."""

    steps: int
    batch_tokens: int
    """Tokens per step."""
    length: int
    """Tokens per sequence."""
    learning_rate: float
    transfer_steps: int
    """Number of first steps, which fit the attention outputs of each layer to the teacher's."""
    log_every: int
    """Steps between two log entries."""


def conversions(heads: tuple[int, int]) -> tuple[list[Conversion], list[str]]:
    """Conversions of a model with these numbers of query and key/value heads, and messages about omitted ones."""
    query, key_value = heads
    options = [Conversion("knocking", "one map shared by all heads, neutral start", "knocking", calibrated=False)]
    left_out = []
    cached, active = round(key_value * CACHED), round(query * ROUTED / 100)
    if cached < key_value:
        message = f"{cached} of {key_value} key/value heads in the cache"
        options.append(Conversion("explicit", message, f"explicit:key_heads={cached},value_heads={cached}"))
    else:
        left_out.append(f"explicit is left out: it needs at least 2 key/value heads, and the model has {key_value}")
    if active < query:
        message = f"{active} of {query} query heads active for each token, not trained"
        options.append(Conversion("mixture", message, f"mixture:active_heads={ROUTED}%"))
    else:
        left_out.append(f"mixture is left out: {ROUTED}% of {query} query heads are all of them")
    return options, left_out


def continue_training(
    source: str, text: Path, model: Path, training: Training, target: Path, work: Path, show: Progress
) -> None:
    """Train a converted model with a shortened copy of a shipped recipe and the source as the teacher."""
    changes = {
        "output": str(work / "run"),
        "model.path": str(model),
        "model.config": None,
        "model.convert": None,
        "data.sources": [{"path": str(text)}],
        "data.held_out": 0,
        "data.length": training.length,
        "data.cache": str(work / "tokens"),
        "distillation.teacher": source,
        "distillation.transfer_steps": training.transfer_steps,
        "train.tokens": training.steps * training.batch_tokens,
        "train.batch_tokens": training.batch_tokens,
        "train.micro_batch": 1,
        "train.learning_rate": training.learning_rate,
        "train.dtype": str(fast_dtype()).removeprefix("torch."),
        "watch.every": training.log_every,
        "watch.evaluate_every": None,
        "checkpoints.every": training.steps,
        "checkpoints.keep": 1,
    }
    recipe = load_recipe(
        "small/smollm2_explicit", [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
    )
    outcome = train(recipe, show)
    if outcome.model is None:
        raise KeyboardInterrupt  # the run was stopped, and has saved a checkpoint
    shutil.move(outcome.model, target)
