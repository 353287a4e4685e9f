"""Top-k probabilities of the teacher for every sample of a run, stored on disk for offline distillation.

indices      token ids (samples, length, k), uint32
logarithms   log-probabilities among all tokens (samples, length, k), float16
logits.json  shape, vocabulary size, data fingerprint, seed, and identity of the teacher's weights
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from crosshead.common.errors import RecipeError, one_line, os_errors
from crosshead.common.progress import Progress, silent

from ..data.training_data import Sample, TrainingData, open_data
from ..schema.recipe import Recipe
from ..schema.sections import Distillation
from .checkpoints import DATA, LOCK, OTHER_DATA, locked_output, move_synced
from .loading import initial_config, load_tokenizer, weights_identity
from .models import load_teacher
from .training_arguments import training_arguments

HIGHEST = 64
"""Number of probabilities (k) stored per token; all other tokens count as one outcome."""
RECORD = "logits.json"
INDICES, LOG_PROBS = "teacher_indices", "teacher_logarithms"
FILES = {INDICES: ("indices", np.uint32), LOG_PROBS: ("logarithms", np.float16)}
"""Key of a sample -> file name and dtype."""


def run_key(recipe: Recipe, data: TrainingData) -> dict[str, Any]:
    """Return the settings that determine the samples of a run and their order."""
    return {DATA: data.fingerprint, "seed": recipe.train.seed}


def teacher_of(logits: str) -> str | None:
    """Return the identity of the teacher whose logits are in a folder; None if it is not recorded."""
    try:
        identity = json.loads((Path(logits) / RECORD).read_bytes()).get("teacher")
    except (OSError, ValueError, AttributeError):  # `WithTeacher` reports the error
        return None
    return identity if isinstance(identity, str) else None


def save_teacher(recipe: Recipe, folder: Path, progress: Progress = silent) -> None:
    """Run the teacher on all samples of the recipe's run, and write the folder for `distillation.logits`."""
    if recipe.distillation is None or recipe.distillation.teacher is None:
        raise RecipeError("the recipe has no distillation.teacher whose logits could be saved: name one")
    if recipe.distillation.weight == 0:
        raise RecipeError("distillation.weight=0 does not use the teacher's logits: give a weight above 0")
    arguments = training_arguments(recipe)
    if arguments.world_size > 1:
        raise RecipeError(f"{arguments.world_size} processes would write the same logits: start one")
    vocabulary, tokenizer = initial_config(recipe).vocab_size, load_tokenizer(recipe)
    teacher = load_teacher(recipe, vocabulary, tokenizer).to(arguments.device)
    data = open_data(recipe.data, tokenizer, vocabulary, progress)
    samples = data.samples(recipe.steps * recipe.batch_size, recipe.train.seed)
    partial = folder.with_name(f".{folder.name}.partial")
    label = f"the folder {folder} for the teacher's logits"
    with os_errors(RecipeError, f"{label} cannot be written"), locked_output(partial, label):
        try:
            if folder.exists():
                raise RecipeError(f"{folder} exists: choose another folder for the teacher's logits")
            with torch.autocast(arguments.device.type, torch.bfloat16, enabled=recipe.train.dtype == "bfloat16"):
                shape = _write(teacher, DataLoader(samples, recipe.train.micro_batch), partial, progress)
            identity = weights_identity(recipe.distillation.teacher, teacher.config)
            record = {"shape": shape, "vocabulary": teacher.config.vocab_size, "teacher": identity}
            record |= run_key(recipe, data)
            (partial / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
            (partial / LOCK).unlink()
            move_synced(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@torch.inference_mode()
def _write(teacher: Any, batches: DataLoader[Sample], folder: Path, progress: Progress) -> tuple[int, int, int]:
    """Run the teacher, write both tensors, and return their shape (samples, length, k)."""
    count, done = len(batches.dataset), 0  # type: ignore[arg-type]
    highest = min(HIGHEST, teacher.config.vocab_size)
    with (folder / FILES[INDICES][0]).open("wb") as indices, (folder / FILES[LOG_PROBS][0]).open("wb") as logarithms:
        for batch in batches:
            inputs = {name: value.to(teacher.device) for name, value in batch.items() if name != "labels"}
            logits = teacher(**inputs, use_cache=False)["logits"].float()
            top = logits.log_softmax(-1).topk(highest, dim=-1)
            indices.write(top.indices.cpu().numpy().astype(FILES[INDICES][1]).tobytes())
            logarithms.write(top.values.cpu().numpy().astype(FILES[LOG_PROBS][1]).tobytes())
            done += len(logits)
            progress("teacher", done, count)
    return count, logits.shape[1], highest


class WithTeacher(Dataset[Sample]):
    """Training samples with the teacher's stored token ids and log-probabilities (length, k)."""

    def __init__(self, samples: Dataset[Sample], options: Distillation, key: dict[str, Any], vocabulary: int) -> None:
        self._samples = samples
        name, folder = f"distillation.logits={options.logits}", Path(str(options.logits))
        try:
            record = json.loads((folder / RECORD).read_bytes())
            shape, size = tuple(record["shape"]), record["vocabulary"]
            self._files = {
                tensor: np.memmap(folder / file, dtype, "r", shape=shape) for tensor, (file, dtype) in FILES.items()
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RecipeError(f"{name} cannot be read: {one_line(error)}") from None
        for setting, value in key.items():
            if record.get(setting) != value:
                made = f"with {setting}={record.get(setting)!r}, but the run has {value!r}"
                raise RecipeError(f"{name} was made {OTHER_DATA if setting == DATA else made}: make it again")
        if shape[0] < len(self):
            raise RecipeError(f"{name} has {shape[0]} samples, but the run has {len(self)}: make it again")
        if size > vocabulary:
            raise RecipeError(f"{name} is of a teacher with {size} tokens, but the model has {vocabulary}")

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        indices, logarithms = self._files[INDICES][index].astype(np.int64), self._files[LOG_PROBS][index].copy()
        return self._samples[index] | {INDICES: torch.from_numpy(indices), LOG_PROBS: torch.from_numpy(logarithms)}
