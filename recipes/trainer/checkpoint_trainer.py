"""transformers' Trainer with atomic checkpoints and a saved model that loads without crosshead."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from crosshead.common.errors import RecipeError, one_line

from .checkpoints import PARTIAL, publish, step_of, writing
from .dit_model import save_model, save_weights
from .parameters import has_lora

FSDP_MODEL = "pytorch_model_fsdp.bin"
"""Name of the weights in a checkpoint that was written with FSDP."""


class CheckpointTrainer(Trainer):
    """A Trainer whose run can be resumed after being killed at any moment."""

    model: Any

    def __init__(self, output: Path, checkpoint: Path | None, keep: int, **options: Any) -> None:
        self.output, self.checkpoint, self.keep = output, checkpoint, keep
        self._model_class = type(options["model"])
        super().__init__(**options)
        self._is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if checkpoint is not None:
            self._check_checkpoint(checkpoint)
        if has_lora(options["model"]) and self._is_sharded:
            raise RecipeError(
                "train.trainable='mixers+lora' is not possible with FSDP or DeepSpeed, which shard each matrix: use "
                "'mixers' or 'all', or start without them"
            )
        if self._is_dit and self._is_sharded:
            raise RecipeError("the objective noise is not possible with FSDP or DeepSpeed: start without them")
        if self.is_fsdp_enabled and "FULL" not in str(self.accelerator.state.fsdp_plugin.state_dict_type):
            raise RecipeError(
                "fsdp_state_dict_type: only FULL_STATE_DICT is allowed, as loading the others runs pickled code"
            )

    @property
    def _is_dit(self) -> bool:
        """Whether the model is a diffusers model (DiT)."""
        return not isinstance(self.model, PreTrainedModel) and not has_lora(self.model)

    def _check_checkpoint(self, checkpoint: Path) -> None:
        """Check step, optimizer state and sharding, which transformers does not check."""
        if self.is_fsdp_enabled != (checkpoint / FSDP_MODEL).exists():
            how = "without" if self.is_fsdp_enabled else "with"
            raise RecipeError(f"{checkpoint} was written {how} FSDP: resume {how} it, or choose another output")
        with self._loading():
            step = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
            if step != step_of(checkpoint):
                raise ValueError(f"its {TRAINER_STATE_NAME} is of step {step}")
            if not self.is_deepspeed_enabled and not any(checkpoint.glob("optimizer*")):
                raise ValueError("it lacks the optimizer's state")

    def save_result(self, folder: Path) -> None:
        """Save only the trained model, with merged LoRA weights, for `from_pretrained`."""
        state = self.accelerator.get_state_dict(self.model_wrapped) if self._is_sharded else None
        if not self.args.should_save:
            return
        if has_lora(self.model):
            self.model.merge_and_unload().save_pretrained(str(folder))
        elif self._is_dit:
            save_model(self.model, folder)
        else:
            self._unwrapped().save_pretrained(str(folder), state_dict=state)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model for a checkpoint: tensors as in memory, not converted, and no pickled arguments."""
        if not self.args.should_save:
            return
        if self._is_dit:
            save_weights(self.model, Path(str(output_dir)))
        else:
            self._unwrapped().save_pretrained(output_dir, state_dict=state_dict, save_original_format=False)

    def _unwrapped(self) -> Any:
        """Return the model in its original class: the class that FSDP creates would be saved as custom code."""
        if not self.is_fsdp_enabled:
            return self.model
        with torch.device("meta"):
            model = self._model_class(self.model.config)
        model.generation_config = getattr(self.model, "generation_config", None)
        return model

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._loading():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._loading():
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._loading():
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        wrong = [*(set(load_result.missing_keys) - set(tied)), *load_result.unexpected_keys]
        if wrong:
            raise ValueError(f"it does not fit the model, as {min(wrong)} shows")

    @contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # many types; only the first sentence, as torch adds unsafe advice after it
            raise RecipeError(
                f"{self.checkpoint} cannot be loaded: {one_line(error).split('. ')[0]}; if it is damaged, remove it: "
                "the same command then resumes from the checkpoint before"
            ) from error

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.output / PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        partial = self.output / PARTIAL / f"checkpoint-{step}"
        with writing(f"the checkpoint at step {step}", self.output):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                publish(partial, self.output, self.keep)
        self.accelerator.wait_for_everyone()
