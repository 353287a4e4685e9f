"""Writes the teacher's probabilities for every sample of a run, so that later runs do without the teacher."""

from functools import partial
from pathlib import Path

import torch

from crosshead.common.errors import RecipeError

from ..data.training_data import open_data
from ..schema.recipe import Recipe
from .models import load_teacher, load_tokenizer, vocabulary_of
from .progress import Progress, silent
from .teacher_logits import belonging, write_logits
from .training_arguments import training_arguments


def save_teacher(recipe: Recipe, folder: Path, progress: Progress = silent) -> None:
    """Write the folder that `distillation.logits` names, for this recipe's data, seed and number of tokens."""
    if recipe.distillation is None or recipe.distillation.teacher is None:
        raise RecipeError("there is no distillation.teacher whose logits could be saved: name one")
    arguments = training_arguments(recipe)
    if arguments.world_size > 1:
        raise RecipeError(f"{arguments.world_size} processes would write the same logits: start one")
    vocabulary, tokenizer = vocabulary_of(recipe), load_tokenizer(recipe)
    teacher = load_teacher(recipe.distillation.teacher, vocabulary, tokenizer).to(arguments.device)
    data = open_data(recipe.data, tokenizer, vocabulary, progress)
    samples = data.samples(recipe.steps * recipe.batch_size, recipe.train.seed)
    belongs, advance = belonging(recipe, data), partial(progress, "teacher")
    with torch.autocast(arguments.device.type, torch.bfloat16, enabled=recipe.train.dtype == "bfloat16"):
        write_logits(teacher, samples, recipe.train.micro_batch, belongs, folder, advance)
