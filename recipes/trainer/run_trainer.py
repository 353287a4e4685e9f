"""transformers' Trainer with a recipe's sampling order, learning-rate schedule, loss, evaluation and metrics."""

import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput

from crosshead.common.errors import DivergedError, RecipeError

from ..schema.recipe import Recipe
from .callbacks import ApplyIntervals
from .checkpoint_trainer import CheckpointTrainer
from .checkpoints import checkpoints, step_of
from .drift import drift, starting_points
from .load_balance import ExpertBalance, HeadRouting, load_biases_everywhere, load_metrics
from .loss import TrainingLoss
from .metrics import LossMonitor, MetricsFile, check_finite
from .objectives import objective_of
from .parameters import ATTENTION, learning_rate_factor, separate_mechanisms
from .weight_average import WeightAverage


class RunTrainer(CheckpointTrainer):
    """Trainer for one run of a recipe, which starts at step 0 or from a checkpoint."""

    train_dataset: Any
    optimizer: Any

    def __init__(self, recipe: Recipe, teacher: Any, checkpoint: Path | None, **options: Any) -> None:
        model = options["model"]
        use_cache = getattr(model.config, "use_cache", None)
        self.recipe = recipe
        # A diffusers config has no methods, so that the model itself describes its layers.
        described = model if hasattr(model, "mixers_of_layer") else model.config
        self.routing = HeadRouting.of(described)
        self.balance = ExpertBalance(model, recipe.train.expert_bias_rate)
        self.run_objective = objective_of(recipe)
        self.run_objective.check_losses(described.mechanisms() if hasattr(described, "mechanisms") else ())
        self.training_loss = TrainingLoss(self.run_objective, self.routing, recipe.distillation, teacher)
        self.first_step = step_of(checkpoint) if checkpoint else 0
        self.starts = starting_points(model)
        super().__init__(Path(recipe.output), checkpoint, recipe.checkpoints.keep, **options)
        load_biases_everywhere(self.accelerator, model.config, recipe.model.path)
        if use_cache is not None:
            model.config.use_cache = use_cache  # the Trainer sets it to False, which would be saved
        self.remove_callback(PrinterCallback)
        self.add_callback(ApplyIntervals)
        self.add_callback(self.balance)
        self.average = self._averaging(recipe.train.average, checkpoint)
        self.model_accepts_loss_kwargs = True  # transformers cannot detect it through peft's wrapper
        self.monitor = LossMonitor(recipe.loss_changes)
        self.monitor.update(MetricsFile.losses(self.output, self.first_step), 1)
        self.metrics = MetricsFile(self.output, self.first_step) if self.is_world_process_zero() else None
        self._micro_losses: list[torch.Tensor] = []
        self._loads: list[list[torch.Tensor]] = []
        self._rng_is_restored = checkpoint is None
        self._lacks_evaluation = self._was_stopped_before_evaluation()
        self._save_is_due = False

    def _was_stopped_before_evaluation(self) -> bool:
        """Whether the run was stopped at the checkpoint's step before its due evaluation."""
        every = self.recipe.watch.evaluate_every
        if not every or self.eval_dataset is None or not 0 < self.first_step < self.recipe.steps:
            return False
        evaluated = {line["step"] for line in MetricsFile.lines(self.output) if "eval_loss" in line}
        return self.first_step % every == 0 and self.first_step not in evaluated

    def _averaging(self, decay: float | None, checkpoint: Path | None) -> WeightAverage | None:
        """Return the weight average, new or loaded from the checkpoint; None if the recipe does not average."""
        if decay is None:
            return None
        if self._is_sharded:
            raise RecipeError(
                f"train.average={decay:g} is not possible with FSDP or DeepSpeed, which shard the weights: leave it "
                "out, or start without them"
            )
        average = WeightAverage(self.model, decay)
        if checkpoint is not None:
            with self._loading():
                average.load(checkpoint)
        self.add_callback(average)
        return average

    def _averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if the recipe averages weights."""
        return self.average.applied() if self.average is not None else nullcontext()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model for a checkpoint, and the averaged weights."""
        super()._save(output_dir, state_dict)
        if self.average is not None and self.args.should_save:
            self.average.save(Path(str(output_dir)))

    def save_result(self, folder: Path) -> None:
        """Save the trained model, with averaged weights if the recipe averages weights."""
        with self._averaged():
            super().save_result(folder)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return range(self.first_step * self.recipe.batch_size, len(self.train_dataset))  # type: ignore[return-value]

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the Trainer's optimizer, with separate groups for mechanisms."""
        if self.optimizer is None:
            optimizer = super().create_optimizer(*([] if model is None else [model]))
            trained = self.model if model is None else model
            separate_mechanisms(optimizer, trained, self.get_decay_parameter_names(trained), self.recipe.train)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the learning-rate schedule of the recipe."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: learning_rate_factor(self.recipe, step)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(self, *args: Any) -> Any:
        """Get the micro batches of a step.

        On the first call after resuming, make up for a missing evaluation, and restore the random state that the data
        loader has changed.
        """
        batches = super().get_batch_samples(*args)
        if not self._rng_is_restored:
            if self._lacks_evaluation:
                self.evaluate()
            self._load_rng_state(str(self.checkpoint))
            self._rng_is_restored = True
        return batches

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro batch, scaled for gradients that are averaged over processes."""
        step, items = self.state.global_step, torch.as_tensor(num_items_in_batch).clamp(min=1)
        with self.accelerator.autocast(), self.balance.counting():  # autocast applies to the teacher, too
            loss, outputs = self.training_loss(model, inputs, items, step)
        if self.routing is not None and self._is_logged(step + 1):
            self._loads.append(self.routing.load(self.routing.scores(outputs)))
        loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def _is_logged(self, step: int) -> bool:
        """Whether metrics are logged after this step."""
        every = (self.args.logging_steps, self.args.save_steps)
        return step == self.args.max_steps or any(step % interval == 0 for interval in every)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a micro batch, and keep its loss for the log."""
        loss = super().training_step(*args, **kwargs)
        self.training_loss.finish()
        if self.training_loss.is_transfer_step(self.state.global_step):
            for name, parameter in self.model.named_parameters():
                if f"{ATTENTION}." not in name:
                    parameter.grad = None  # the optimizer skips the parameter, including its weight decay
        self._micro_losses.append(loss.detach())
        return loss

    def evaluation_loop(self, dataloader: Any, description: str, *_: Any, **options: Any) -> EvalLoopOutput:
        """Return each metric's mean over all predictions; no metrics if the run is stopped during the evaluation.

        The means do not depend on the division into batches and processes.
        """
        self.model.eval()
        gathered: dict[str, list[torch.Tensor]] = {}
        is_last = self.control.should_training_stop
        with torch.random.fork_rng(devices=[]), self._averaged():  # the data loader changes the random state
            for inputs in dataloader:
                scores = self.run_objective.evaluate(self.model, self._prepare_inputs(inputs))
                for name, score in scores.items():
                    gathered.setdefault(f"eval_{name}", []).append(self.accelerator.gather_for_metrics(score))
                self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                if self.control.should_training_stop and not is_last:
                    return EvalLoopOutput(np.empty(0), None, {}, len(dataloader.dataset))
        sums = {name: torch.cat(parts).double().sum(0).tolist() for name, parts in gathered.items()}
        metrics = {name: total / count for name, (total, count) in sums.items()}
        return EvalLoopOutput(np.empty(0), None, metrics, len(dataloader.dataset))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log before each checkpoint, so that metrics.jsonl is complete up to the step of a resumed run."""
        self.control.should_save |= self._save_is_due and self.control.should_log
        self.control.should_log |= self.control.should_save
        saves = self.control.should_save or self.control.should_training_stop
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.control.should_training_stop and not saves:  # a signal came during the evaluation
            self.control.should_evaluate, self.control.should_save = False, True
            self._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint; while the loss is high, delay it unless the run is stopped, and delete no old ones."""
        self._save_is_due = self.monitor.is_high and not self.control.should_training_stop
        if self._save_is_due:
            return
        self.keep = sys.maxsize if self.monitor.is_high else self.recipe.checkpoints.keep
        super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log losses of all steps since the last log, spikes, head and expert load, and drift of mechanisms."""
        step = self.state.global_step
        line: dict[str, Any] = {"step": step}
        if "loss" in logs:
            line["losses"] = self._step_losses()
            try:
                self.monitor.update(line["losses"], step - len(line["losses"]) + 1)
                check_finite("gradient's norm", logs.get("grad_norm", 0.0), step)  # the next weights would be nan
            except DivergedError as error:
                raise self._diverged(error, line["losses"], step) from None
            logs |= {"spikes": self.monitor.spikes, **self._head_load(), **self.balance.metrics()}
            with self._averaged():
                logs |= drift(self.model, self.starts)
        if self.metrics is not None and ("loss" in logs or "eval_loss" in logs):
            self.metrics.write(line | logs)
        super().log(logs, start_time)

    def _diverged(self, error: DivergedError, losses: list[float], step: int) -> DivergedError:
        """Write the finite losses, and return the error with the path of the last good checkpoint.

        The weights of a checkpoint are good if the loss of the next step is.
        """
        finite = [*takewhile(isfinite, losses)]
        if self.metrics is not None and finite:
            self.metrics.write({"step": step - len(losses) + len(finite), "losses": finite})
        good = [path for path in checkpoints(self.output) if step_of(path) < self.monitor.last_good]
        advice = f"the last good checkpoint is {good[0]}" if good else "there is no good checkpoint"
        return DivergedError(f"{error}; {advice}")

    def _head_load(self) -> dict[str, float]:
        """Return minimum and maximum load of routed heads per layer, averaged over micro batches and processes."""
        loads, self._loads = self._loads, []
        if self.routing is None or not loads:
            return {}
        layers = (torch.stack(layer).mean(0) for layer in zip(*loads, strict=True))
        reduced = (self.accelerator.reduce(layer, "mean") for layer in layers)
        return load_metrics("head_load", dict(zip(self.routing.layers, reduced, strict=True)))

    def _step_losses(self) -> list[float]:
        """Return the losses of the steps since the last log."""
        by_step = torch.stack(self._micro_losses).view(-1, self.args.gradient_accumulation_steps).sum(1)
        self._micro_losses = []
        return self.accelerator.reduce(by_step.float(), "mean").tolist()
