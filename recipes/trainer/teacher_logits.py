"""A teacher's highest probabilities for every sample of a run, on disk: distillation without the teacher.

indices      (samples, length, k) uint32
logarithms   the same, float16: of the probabilities among all tokens
logits.json  what they belong to
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from crosshead.common.errors import RecipeError, one_line

from ..data.packing import Sample
from ..data.training_data import TrainingData
from ..schema.recipe import Recipe
from ..schema.sections import Distillation
from .checkpoints import put

HIGHEST = 64
"""Kept of each prediction; the rest counts as one outcome."""
RECORD = "logits.json"
INDICES, LOGARITHMS = "teacher_indices", "teacher_logarithms"
TYPES = {INDICES: ("indices", np.uint32), LOGARITHMS: ("logarithms", np.float16)}


def belonging(recipe: Recipe, data: TrainingData) -> dict[str, Any]:
    """Which samples a run sees, and in which order."""
    return {"data": data.fingerprint, "seed": recipe.train.seed}


def write_logits(
    teacher: Any,
    samples: Dataset[Sample],
    batch: int,
    belongs: dict[str, Any],
    folder: Path,
    advance: Callable[[int, int], None],
) -> None:
    """Ask the teacher about every sample, so many at once; `belongs` says which run they are of."""
    if folder.exists():
        raise RecipeError(f"{folder} is already there: choose another folder for the teacher's logits")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shape = _write(teacher, samples, batch, partial, advance)
        record = {"shape": shape, "vocabulary": teacher.config.vocab_size, **belongs}
        (partial / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
        put(partial, folder)
    except OSError as error:
        raise RecipeError(f"the teacher's logits cannot be written to {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.inference_mode()
def _write(
    teacher: Any, samples: Dataset[Sample], batch: int, folder: Path, advance: Callable[[int, int], None]
) -> tuple[int, int, int]:
    count, done = len(samples), 0  # type: ignore[arg-type]
    highest = min(HIGHEST, teacher.config.vocab_size)
    with (folder / TYPES[INDICES][0]).open("wb") as indices, (folder / TYPES[LOGARITHMS][0]).open("wb") as logarithms:
        for inputs in DataLoader(samples, batch):
            asked = {name: value.to(teacher.device) for name, value in inputs.items() if name != "labels"}
            logits = teacher(**asked, use_cache=False)["logits"].float()
            found = logits.log_softmax(-1).topk(highest, dim=-1)
            indices.write(found.indices.cpu().numpy().astype(TYPES[INDICES][1]).tobytes())
            logarithms.write(found.values.cpu().numpy().astype(TYPES[LOGARITHMS][1]).tobytes())
            done += len(logits)
            advance(done, count)
    return count, logits.shape[1], highest


class WithTeacher(Dataset[Sample]):
    """Samples, each with what the teacher makes of it."""

    def __init__(
        self, samples: Dataset[Sample], options: Distillation, belongs: dict[str, Any], vocabulary: int
    ) -> None:
        self._samples, self._key = samples, f"distillation.logits={options.logits}"
        folder = Path(str(options.logits))
        try:
            record = json.loads((folder / RECORD).read_bytes())
            shape, known = tuple(record["shape"]), record["vocabulary"]
            self._files = {
                name: np.memmap(folder / file, dtype, "r", shape=shape) for name, (file, dtype) in TYPES.items()
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RecipeError(f"{self._key} cannot be read: {one_line(error)}") from None
        self._check(record, belongs)
        if shape[0] < len(self):
            raise RecipeError(f"{self._key} are of {shape[0]} samples, and the run has {len(self)}: make them again")
        if known > vocabulary:
            raise RecipeError(f"{self._key} are of a teacher with {known} tokens, and the model knows {vocabulary}")

    def _check(self, record: dict[str, Any], belongs: dict[str, Any]) -> None:
        for name, now in belongs.items():
            if record.get(name) != now:
                raise RecipeError(
                    f"{self._key} were made with {name}={record.get(name)!r}, and now it is {now!r}: make them again"
                )

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        rows = {
            INDICES: self._files[INDICES][index].astype(np.int64),
            LOGARITHMS: self._files[LOGARITHMS][index].copy(),
        }
        return self._samples[index] | {name: torch.from_numpy(row) for name, row in rows.items()}
