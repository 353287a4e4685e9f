"""transformers' Trainer with atomic checkpoints, and a result that loads without crosshead."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from crosshead.common.errors import RecipeError, one_line

from .checkpoints import PARTIAL, publish, step_of
from .trainable import is_wrapped, whole_model


class CheckpointTrainer(Trainer):
    """What one that is killed at any moment goes on from."""

    model: Any

    def __init__(self, output: Path, checkpoint: Path | None, keep: int, **options: Any) -> None:
        self.output, self.checkpoint, self.keep = output, checkpoint, keep
        self._kind = type(options["model"])
        super().__init__(**options)
        if checkpoint is not None:
            self._check_checkpoint(checkpoint)
        if is_wrapped(options["model"]) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise RecipeError(
                "train.trainable='mixers+lora' is not for FSDP or DeepSpeed, which hold a part of each matrix: use "
                "'mixers' or 'all', or start without them"
            )
        if self.is_fsdp_enabled and "FULL" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            raise RecipeError(
                "fsdp_state_dict_type: only FULL_STATE_DICT is allowed, as others are read by code that they bring"
            )

    def _check_checkpoint(self, checkpoint: Path) -> None:
        """It is of the step that its name says, and has the optimizer's moments, which the library does not miss."""
        with self._reading():
            step = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
            if step != step_of(checkpoint):
                raise ValueError(f"its {TRAINER_STATE_NAME} is of step {step}")
            if not self.is_deepspeed_enabled and not any(checkpoint.glob("optimizer*")):
                raise ValueError("it lacks the optimizer's state")

    def save_result(self, folder: Path) -> None:
        """The trained model alone, as `from_pretrained` reads it."""
        if is_wrapped(self.model):
            if self.args.should_save:
                whole_model(self.model).save_pretrained(str(folder))
            return
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        state = self.accelerator.get_state_dict(self.model_wrapped) if sharded else None
        if self.args.should_save:
            self._plain_model().save_pretrained(str(folder), state_dict=state)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """For a checkpoint: tensors as they are in memory, which is what is read back, and no pickle of arguments."""
        if self.args.should_save:
            self._plain_model().save_pretrained(output_dir, state_dict=state_dict, save_original_format=False)

    def _plain_model(self) -> Any:
        """As the class that it was: FSDP makes one of its own, whose file would be saved as the model's code."""
        if not self.is_fsdp_enabled:
            return self.model
        with torch.device("meta"):
            model = self._kind(self.model.config)
        model.generation_config = self.model.generation_config
        return model

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._reading():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._reading():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._reading():
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        wrong = [*(set(load_result.missing_keys) - set(tied)), *load_result.unexpected_keys]
        if wrong:
            raise ValueError(f"it does not fit the model, as {min(wrong)} shows")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a damaged file fails in many ways; torch goes on with advice nobody should take
            raise RecipeError(
                f"{self.checkpoint} cannot be loaded: {one_line(error).split('. ')[0]}; if it is damaged, remove it, "
                "and the same command goes on from the one before"
            ) from error

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.output / PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        partial = self.output / PARTIAL / f"checkpoint-{step}"
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                publish(partial, self.output, self.keep)
        except Exception as error:  # each library has its own for a disk that is full
            shutil.rmtree(partial, ignore_errors=True)
            raise RecipeError(unwritten(f"the checkpoint at step {step}", self.output, error)) from error
        self.accelerator.wait_for_everyone()


def unwritten(what: str, output: Path, error: Exception) -> str:
    """What to say when something could not be written to the folder of a run."""
    free = shutil.disk_usage(output).free / 1e9
    return (
        f"{what} could not be written to {output}, whose disk has {free:.3f} GB free: {one_line(error)}; earlier "
        "checkpoints are as they were, and the same command goes on from them"
    )
