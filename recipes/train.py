"""Runs a recipe: start or resume, train, stop cleanly, and save a model that loads anywhere."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crosshead.common.access_tokens import leave_out_tokens
from crosshead.common.errors import RecipeError
from crosshead.common.posix import require_posix

from .data.training_data import TrainingData, open_data
from .estimate.sharding import ZERO3, check_teacher
from .schema.model_config import check_expert_bias
from .schema.recipe import Recipe
from .trainer.checkpoint_trainer import unwritten
from .trainer.checkpoints import MODEL, PARTIAL, check_run, checkpoints, only_run, put, step_of
from .trainer.metrics import MetricsFile
from .trainer.models import check_matches, files_beside, load_model, load_teacher, load_tokenizer
from .trainer.process_group import in_turn
from .trainer.progress import Progress, TellSteps, silent
from .trainer.run_trainer import RunTrainer
from .trainer.stopping import StopRequest, StopWhenAsked
from .trainer.teacher_logits import WithTeacher, belonging
from .trainer.trainable import set_trainable
from .trainer.training_arguments import training_arguments

RESULT = "training.json"
SETTINGS = ("config.json", "generation_config.json")
"""Files of the result that repeat what the model to continue had in them, whatever it was."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    steps: int
    stopped_by: int | None
    """The signal, where one ended the run before its last step."""
    model: Path | None
    """The result, where the run is done."""
    metrics: dict[str, Any]
    """The last of each."""


def train(recipe: Recipe, progress: Progress = silent) -> Outcome:
    """Begin the run, or go on from its newest complete checkpoint."""
    require_posix("training")
    from accelerate import PartialState

    arguments = training_arguments(recipe)
    processes = PartialState()  # as the arguments have set it up
    with only_run(Path(recipe.output)) if processes.is_main_process else nullcontext():
        return _run(recipe, arguments, processes, progress if processes.is_main_process else silent)


def _run(recipe: Recipe, arguments: Any, processes: Any, progress: Progress) -> Outcome:
    output = Path(recipe.output)
    tokenizer = load_tokenizer(recipe)
    models, beside = _models(recipe, tokenizer), files_beside(recipe.model)
    data = open_data(recipe.data, tokenizer, models[0].config.vocab_size, progress)
    in_turn(partial(_claim, output, identity(recipe, data), processes.is_main_process))
    if (output / MODEL / RESULT).is_file():
        return _done(recipe)
    newest = _newest(output)
    request = StopRequest()
    callbacks = [StopWhenAsked(request), TellSteps(progress, recipe.train.batch_tokens)]
    trainer = _trainer(recipe, models, data, newest, args=arguments, callbacks=callbacks)
    with request.listening():
        # Also behind the last step: this is how every kind of sharding reads its checkpoint.
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if trainer.state.global_step < recipe.steps:
        return Outcome(trainer.state.global_step, recipe.steps, request.signal, None, MetricsFile.last(output))
    _finish(recipe, trainer, tokenizer, beside)
    return _done(recipe)


def identity(recipe: Recipe, data: TrainingData) -> dict[str, Any]:
    """What decides the losses of a run: all of the recipe but what may change on the way."""
    content = asdict(recipe)
    free = {"output", "watch", "checkpoints", "hub", "sweep", "data"}
    of_the_machine = {"micro_batch", "checkpoint_activations", "convert"}
    flat: dict[str, Any] = {"data": data.fingerprint, "steps": recipe.steps}
    for section, value in content.items():
        if section in free:
            continue
        if not isinstance(value, dict):
            flat[section] = value
            continue
        flat |= {f"{section}.{key}": part for key, part in value.items() if key not in of_the_machine}
    return json.loads(json.dumps(flat))


def _claim(output: Path, run: dict[str, Any], is_main: bool) -> None:
    try:
        check_run(output, run)
        if is_main:
            shutil.rmtree(output / PARTIAL, ignore_errors=True)
    except OSError as error:
        raise RecipeError(f"output={output} cannot be written: {error.strerror}") from None


def _newest(output: Path) -> Path | None:
    """The checkpoint to go on from, which every process must see."""
    from accelerate.utils import gather_object

    newest = next(iter(checkpoints(output)), None)
    steps = gather_object([step_of(newest) if newest else 0])
    if len(set(steps)) > 1:
        raise RecipeError(f"output={output} is not the same for all processes: use a disk that all machines share")
    return newest


def _models(recipe: Recipe, tokenizer: Any) -> tuple[Any, Any]:
    """The model, ready to be trained, and its teacher; before the data, which may take hours."""
    from transformers import set_seed
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    model, options, teacher = load_model(recipe, tokenizer), recipe.distillation, None
    check_expert_bias(model.config, recipe.train.expert_bias_rate)
    if options is not None and options.teacher is not None:
        check_teacher(ZERO3 if is_deepspeed_zero3_enabled() else None)
        teacher = load_teacher(options.teacher, model.config.vocab_size, tokenizer)
        check_matches(teacher, model.config, options.teacher, options.match_steps)
    if recipe.train.checkpoint_activations:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    set_seed(recipe.train.seed)
    return set_trainable(model, recipe.train), teacher


def _trainer(
    recipe: Recipe, models: tuple[Any, Any], data: TrainingData, newest: Path | None, **options: Any
) -> RunTrainer:
    model, teacher = models
    samples: Any = data.samples(recipe.steps * recipe.batch_size, recipe.train.seed)
    if recipe.distillation is not None and recipe.distillation.logits is not None:
        samples = WithTeacher(samples, recipe.distillation, belonging(recipe, data), model.config.vocab_size)
    if teacher is not None:
        teacher = teacher.to(options["args"].device)
    return RunTrainer(
        recipe, teacher, newest, model=model, train_dataset=samples, eval_dataset=data.evaluation, **options
    )


def _finish(recipe: Recipe, trainer: RunTrainer, tokenizer: Any, beside: Sequence[Path]) -> None:
    """Write the result beside the checkpoints."""
    output = Path(recipe.output)
    partial = output / PARTIAL / MODEL
    try:
        trainer.save_result(partial)
        if trainer.is_world_process_zero():
            tokenizer.save_pretrained(str(partial))
            for path in beside:
                shutil.copyfile(path, partial / path.name)
            leave_out_tokens(partial / name for name in SETTINGS if (partial / name).is_file())
            content = {"recipe": without_places(asdict(recipe)), "processes": trainer.args.world_size}
            content |= {"metrics": MetricsFile.last(output)}
            (partial / RESULT).write_text(json.dumps(content, indent=2), encoding="utf-8")
            put(partial, output / MODEL)
            shutil.rmtree(output / PARTIAL, ignore_errors=True)
    except Exception as error:  # each library has its own for a disk that is full
        shutil.rmtree(partial, ignore_errors=True)
        raise RecipeError(unwritten("the model", output, error)) from error
    trainer.accelerator.wait_for_everyone()


def without_places(value: Any) -> Any:
    """A recipe without where things lie on this machine: the record is published with the model."""
    if isinstance(value, Mapping):
        return {key: without_places(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(part) for part in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _done(recipe: Recipe) -> Outcome:
    output = Path(recipe.output)
    return Outcome(recipe.steps, recipe.steps, None, output / MODEL, MetricsFile.last(output))
