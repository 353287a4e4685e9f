"""Run a recipe: start or resume, train, stop cleanly, and save a model that loads without crosshead."""

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crosshead.common.access_tokens import leave_out_tokens
from crosshead.common.errors import RecipeError
from crosshead.common.model_location import split_revision
from crosshead.common.posix import require_posix
from crosshead.common.progress import Progress, silent

from .data.training_data import TrainingData
from .published_recipe import published_recipe
from .schema.recipe import Recipe
from .trainer import checkpoints
from .trainer.callbacks import ReportProgress, StopOnSignal
from .trainer.loading import weights_identity
from .trainer.metrics import MetricsFile
from .trainer.models import copied_files, load_models
from .trainer.objectives import objective_of
from .trainer.process_group import is_main_process, main_process_first
from .trainer.run_trainer import RunTrainer
from .trainer.teacher_logits import WithTeacher, run_key, teacher_of
from .trainer.training_arguments import training_arguments

logger = logging.getLogger(__name__)

RESULT = "training.json"
CONFIGS = ("config.json", "generation_config.json", "preprocessor_config.json", "conversion.json", RESULT)
"""Files of the result that may contain access tokens, which are removed."""
NO_EFFECT = ("output", "watch", "checkpoints", "hub", "sweep", "data")
"""Sections that a resumed run may change: they do not affect the losses, or, as `data`, have their own fingerprint."""
NO_EFFECT_KEYS = {"micro_batch", "checkpoint_activations", "convert"}
"""Keys of other sections that do not affect the losses."""


@dataclass(frozen=True)
class Outcome:
    """State of a run when `train` returns."""

    step: int
    """Number of completed optimizer steps."""
    steps: int
    """Number of optimizer steps of the whole run."""
    stopped_by: int | None
    """Number of the signal that stopped the run before its last step."""
    model: Path | None
    """Folder of the trained model; None if the run was stopped."""
    metrics: dict[str, Any]
    """Last value of each metric."""


def train(recipe: Recipe, progress: Progress = silent) -> Outcome:
    """Train a recipe: start its run, or resume it from the newest complete checkpoint in `recipe.output`."""
    require_posix("training")
    arguments = training_arguments(recipe)  # also joins the process group
    with checkpoints.locked_output(Path(recipe.output)) if is_main_process() else nullcontext():
        return _run(recipe, arguments, progress if is_main_process() else silent)


def _run(recipe: Recipe, arguments: Any, progress: Progress) -> Outcome:
    output = Path(recipe.output)
    objective = objective_of(recipe)
    processor = objective.load_processor()
    model, teacher = load_models(recipe, processor)
    extra_files = copied_files(recipe.model)
    data = objective.open_data(processor, model.config, progress)
    run = fingerprint(recipe, data) | initial_weights(recipe, model, teacher)
    with checkpoints.writable(output):
        main_process_first(partial(checkpoints.claim_output, output, run))
    if is_main_process():
        shutil.rmtree(output / checkpoints.PARTIAL, ignore_errors=True)
    if not (output / checkpoints.MODEL / RESULT).is_file():
        if recipe.attention_loss_steps >= recipe.steps and is_main_process():
            logger.warning(
                "distillation.transfer_steps and match_steps are %d steps of %d: the loss on the data is not trained",
                recipe.attention_loss_steps,
                recipe.steps,
            )
        newest = _newest_checkpoint(output)
        on_signal = StopOnSignal()
        trainer = RunTrainer(
            recipe,
            None if teacher is None else teacher.to(arguments.device),
            newest,
            model=model,
            args=arguments,
            train_dataset=_samples(recipe, data, model.config),
            eval_dataset=data.evaluation,
            data_collator=objective.collator,
            callbacks=[on_signal, ReportProgress(progress, recipe.per_step, recipe.objective.unit)],
        )
        with on_signal.listening():
            # Resume even from a checkpoint of the last step: the Trainer knows how to load each kind of sharding.
            trainer.train(resume_from_checkpoint=str(newest) if newest else None)
        step = trainer.state.global_step
        if step < recipe.steps:
            return Outcome(step, recipe.steps, on_signal.signal, None, MetricsFile.last(output))
        if is_main_process() and trainer.monitor.is_high:
            logger.warning("the loss is far above its lowest value: the run diverged, or is about to")
        elif is_main_process():
            with checkpoints.writable(output):
                checkpoints.prune(output, recipe.checkpoints.keep)  # a killed run may have left more
        _save(recipe, trainer, processor, extra_files)
    return Outcome(recipe.steps, recipe.steps, None, output / checkpoints.MODEL, MetricsFile.last(output))


def fingerprint(recipe: Recipe, data: TrainingData) -> dict[str, Any]:
    """Return the settings that determine the losses of a run, as a flat JSON object."""
    flat: dict[str, Any] = {checkpoints.DATA: data.fingerprint, "steps": recipe.steps}
    for section, content in asdict(recipe).items():
        if section in NO_EFFECT:
            continue
        if isinstance(content, dict):
            flat |= {f"{section}.{key}": value for key, value in content.items() if key not in NO_EFFECT_KEYS}
        else:
            flat[section] = content
    return json.loads(json.dumps(flat))


def initial_weights(recipe: Recipe, model: Any, teacher: Any) -> dict[str, str]:
    """Return identities of the initial weights of model and teacher: a path may have other weights later."""
    options = recipe.distillation
    loaded = {"model.path": (recipe.model.path, model)}
    loaded["distillation.teacher"] = (options.teacher if options else None, teacher)
    identities = {
        f"{checkpoints.WEIGHTS_OF} {key}": weights_identity(name, part.config)
        for key, (name, part) in loaded.items()
        if name is not None
    }
    if options is not None and options.logits is not None and (identity := teacher_of(options.logits)) is not None:
        identities[f"{checkpoints.WEIGHTS_OF} distillation.logits"] = identity
    return identities


def _newest_checkpoint(output: Path) -> Path | None:
    """Return the checkpoint to resume from, or None; raise `RecipeError` if processes find different ones."""
    from accelerate.utils import gather_object

    newest = next(iter(checkpoints.checkpoints(output)), None)
    steps = gather_object([checkpoints.step_of(newest) if newest else 0])
    if len(set(steps)) > 1:
        raise RecipeError(f"output={output} is not the same for all processes: use a disk that all machines share")
    return newest


def _samples(recipe: Recipe, data: TrainingData, config: Any) -> Any:
    samples = data.samples(recipe.steps * recipe.batch_size, recipe.train.seed)
    if recipe.distillation is None or recipe.distillation.logits is None:
        return samples
    return WithTeacher(samples, recipe.distillation, run_key(recipe, data), config.vocab_size)


def _save(recipe: Recipe, trainer: RunTrainer, processor: Any, extra_files: Sequence[Path]) -> None:
    """Save the trained model, the processor and `training.json` into the folder `model` of the output."""
    output = Path(recipe.output)
    partial_model = output / checkpoints.PARTIAL / checkpoints.MODEL
    with checkpoints.writing("the model", output):
        trainer.save_result(partial_model)
        if trainer.is_world_process_zero():
            processor.save_pretrained(str(partial_model))
            for path in extra_files:
                shutil.copyfile(path, partial_model / path.name)
            record = {"recipe": published_recipe(recipe), "processes": trainer.args.world_size}
            record |= {"metrics": MetricsFile.last(output)}
            if recipe.model.path is not None and not Path(recipe.model.path).is_dir():
                name, revision = split_revision(recipe.model.path)
                record["source"] = {"kind": "hub", "name": name, "revision": revision}
            (partial_model / RESULT).write_text(json.dumps(record, indent=2), encoding="utf-8")
            leave_out_tokens(partial_model / name for name in CONFIGS if (partial_model / name).is_file())
            checkpoints.move_synced(partial_model, output / checkpoints.MODEL)
            shutil.rmtree(output / checkpoints.PARTIAL, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
