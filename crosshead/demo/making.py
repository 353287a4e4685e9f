"""The demo's models: the conversions of the source, and a short training of one of them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosshead.common.progress import Progress
from crosshead.conversion.calibration.head_statistics import fast_dtype
from crosshead.conversion.options import split_argument
from crosshead.recipes.schema.load import load_recipe
from crosshead.recipes.train import train

ROUTED = 75
"""Per cent of the query heads that a mixture keeps active."""
CACHED = 2 / 3
"""The share of the key/value heads that become component heads."""


@dataclass(frozen=True)
class Conversion:
    """One way to convert the source."""

    name: str
    message: str
    mixer: str
    """As `crosshead convert --mixer` takes it."""
    calibrated: bool = True

    @property
    def mixers(self) -> dict[str, Any]:
        """As `crosshead.convert` takes it."""
        return dict([split_argument(self.mixer)])


@dataclass(frozen=True)
class Training:
    """Length and batch size of the training."""

    steps: int
    batch_tokens: int
    length: int
    learning_rate: float
    transfer_steps: int
    """First steps, which fit attention outputs."""
    log_every: int


def conversions(heads: tuple[int, int]) -> tuple[list[Conversion], list[str]]:
    """The conversions that a model with these counts of query and key/value heads allows; reasons against others."""
    query, key_value = heads
    found = [Conversion("knocking", "one map shared by all heads, neutral start", "knocking", calibrated=False)]
    left_out = []
    cached, active = round(key_value * CACHED), round(query * ROUTED / 100)
    if cached < key_value:
        message = f"{cached} of {key_value} key/value heads in the cache"
        found.append(Conversion("explicit", message, f"explicit:key_heads={cached},value_heads={cached}"))
    else:
        left_out.append(f"explicit is left out: it needs at least 2 key/value heads, and the model has {key_value}")
    if active < query:
        message = f"{active} of {query} query heads active for each token, not trained"
        found.append(Conversion("mixture", message, f"mixture:active_heads={ROUTED}%"))
    else:
        left_out.append(f"mixture is left out: {ROUTED}% of {query} query heads are all of them")
    return found, left_out


def continue_training(
    source: str, text: Path, model: Path, asked: Training, target: Path, work: Path, show: Progress
) -> None:
    """Train a converted model with its shipped recipe, shortened, with the source as the teacher."""
    changes = {
        "output": str(work / "run"),
        "model.path": str(model),
        "model.config": None,
        "model.convert": None,
        "data.sources": [{"path": str(text)}],
        "data.held_out": 0,
        "data.length": asked.length,
        "data.cache": str(work / "tokens"),
        "distillation.teacher": source,
        "distillation.transfer_steps": asked.transfer_steps,
        "train.tokens": asked.steps * asked.batch_tokens,
        "train.batch_tokens": asked.batch_tokens,
        "train.micro_batch": 1,
        "train.learning_rate": asked.learning_rate,
        "train.dtype": str(fast_dtype()).removeprefix("torch."),
        "watch.every": asked.log_every,
        "watch.evaluate_every": None,
        "checkpoints.every": asked.steps,
        "checkpoints.keep": 1,
    }
    recipe = load_recipe(
        "small/smollm2_explicit", [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
    )
    outcome = train(recipe, show)
    if outcome.model is None:
        raise KeyboardInterrupt  # a checkpoint was saved
    shutil.move(outcome.model, target)
