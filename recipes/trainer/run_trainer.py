"""transformers' Trainer with a run's own sampling order, learning rate, loss, evaluation and metrics."""

import sys
from collections.abc import Iterator
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from crosshead.common.errors import DivergedError

from ..schema.recipe import Recipe
from .checkpoint_trainer import CheckpointTrainer
from .checkpoints import checkpoints, step_of
from .drift import moved, starting_points
from .expert_balance import ExpertBalance, read_everywhere
from .loss import HeadRouting, Objective, evaluated, extremes
from .metrics import LossWatch, MetricsFile, check_finite
from .optimizer import rate, separate_mechanisms


class Remaining(Sampler[int]):
    """The samples of a run that are still to come, in order."""

    def __init__(self, first: int, count: int) -> None:
        self._range = range(first, count)

    def __iter__(self) -> Iterator[int]:
        return iter(self._range)

    def __len__(self) -> int:
        return len(self._range)


class AsTheRecipeSays(TrainerCallback):
    """A checkpoint remembers how often to log, evaluate and save; the recipe may have changed its mind."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget what the checkpoint says."""
        state.compute_steps(args, args.max_steps)


class RunTrainer(CheckpointTrainer):
    """One run of a recipe, from its beginning or from a checkpoint."""

    train_dataset: Any
    optimizer: Any
    objective: Objective

    def __init__(self, recipe: Recipe, teacher: Any, checkpoint: Path | None, **options: Any) -> None:
        model = options["model"]
        cached = model.config.use_cache
        self.recipe = recipe
        self.routing = HeadRouting.of(model.config)
        self.balance = ExpertBalance(model, recipe.train.expert_bias_rate)
        self.objective = Objective(self.routing, recipe.distillation, teacher)
        self.first_step = step_of(checkpoint) if checkpoint else 0
        self.starts = starting_points(model)
        super().__init__(Path(recipe.output), checkpoint, recipe.checkpoints.keep, **options)
        read_everywhere(self.accelerator, model.config, recipe.model.path)
        model.config.use_cache = cached  # the library turns it off, also in what is saved
        self.remove_callback(PrinterCallback)
        self.add_callback(AsTheRecipeSays)
        self.add_callback(self.balance)
        self.model_accepts_loss_kwargs = True  # peft's wrapper hides that the model does
        self.loss_watch = LossWatch(recipe.distillation.match_steps if recipe.distillation else 0)
        self.loss_watch.see(MetricsFile.losses(self.output, self.first_step), 1)
        self.metrics = MetricsFile(self.output, self.first_step) if self.is_world_process_zero() else None
        self._step_losses: list[torch.Tensor] = []
        self._loads: list[list[torch.Tensor]] = []
        self._settled = checkpoint is None
        self._owed = False

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return Remaining(self.first_step * self.recipe.batch_size, len(self.train_dataset))

    def create_optimizer(self, model: Any = None) -> Any:
        """The library's, with groups of their own for mechanisms."""
        if self.optimizer is None:
            optimizer = super().create_optimizer(*([] if model is None else [model]))
            trained = self.model if model is None else model
            separate_mechanisms(optimizer, trained, self.get_decay_parameter_names(trained), self.recipe.train)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's learning rate."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: rate(self.recipe, step)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(self, *args: Any) -> Any:
        """After resuming, random numbers go on from where they were, now that the data loader has drawn its own."""
        found = super().get_batch_samples(*args)
        if not self._settled:
            self._load_rng_state(str(self.checkpoint))
            self._settled = True
        return found

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The objective's part for a micro batch."""
        step = self.state.global_step
        with self.accelerator.autocast(), self.balance.counting():  # the teacher, too, runs in the recipe's dtype
            loss, outputs = self.objective(model, inputs, num_items_in_batch, step)
        if self.routing is not None and (step + 1) % self.args.logging_steps == 0:
            self._loads.append(self.routing.load(outputs["head_router_scores"]))
        loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A micro batch; its loss is kept for the log."""
        loss = super().training_step(*args, **kwargs)
        self._step_losses.append(loss.detach())
        return loss

    def evaluation_loop(self, dataloader: Any, description: str, *_: Any, **options: Any) -> EvalLoopOutput:
        """The mean over all predicted tokens, however they are divided into batches and among processes.

        None where the run is asked to stop meanwhile.
        """
        self.model.eval()
        found, is_last = [], self.control.should_training_stop
        with torch.random.fork_rng(devices=[]):  # the data loader draws from them: training must not notice
            for inputs in dataloader:
                found.append(self.accelerator.gather_for_metrics(evaluated(self.model, self._prepare_inputs(inputs))))
                self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                if self.control.should_training_stop and not is_last:
                    return EvalLoopOutput(np.empty(0), None, {}, len(dataloader.dataset))
        losses, counts = torch.cat(found).double().sum(0).tolist()
        return EvalLoopOutput(np.empty(0), None, {"eval_loss": losses / counts}, len(dataloader.dataset))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Whatever is saved has been logged: resuming goes on behind it."""
        self.control.should_save |= self._owed and self.control.should_log
        self.control.should_log |= self.control.should_save
        saves = self.control.should_save or self.control.should_training_stop
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.control.should_training_stop and not saves:  # its evaluation was asked to stop
            self.control.should_evaluate, self.control.should_save = False, True
            self._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """While the loss is too high, later or at the end of a session, and no earlier one goes for it."""
        self._owed = self.loss_watch.above and not self.control.should_training_stop
        if self._owed:
            return
        self.keep = sys.maxsize if self.loss_watch.above else self.recipe.checkpoints.keep
        super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Losses of every step since the last log, spikes, loads, and how far the mechanisms have moved."""
        step = self.state.global_step
        first: dict[str, Any] = {"step": step}
        if "loss" in logs:
            first["losses"] = self._losses()
            try:
                self.loss_watch.see(first["losses"], step - len(first["losses"]) + 1)
                check_finite("gradient's norm", logs.get("grad_norm", 0.0), step)  # or the weights are lost with it
            except DivergedError as error:
                raise self._diverged(error, first["losses"], step) from None
            logs |= {"spikes": self.loss_watch.spikes, **self._head_load(), **self.balance.load()}
            logs |= moved(self.model, self.starts)
        if self.metrics is not None and ("loss" in logs or "eval_loss" in logs):
            self.metrics.write(first | logs)
        super().log(logs, start_time)

    def _diverged(self, error: DivergedError, losses: list[float], step: int) -> DivergedError:
        """With the checkpoint from before; the losses up to there are written all the same.

        What a checkpoint's weights are worth shows in the loss of the step behind it.
        """
        finite = [*takewhile(isfinite, losses)]
        if self.metrics is not None and finite:
            self.metrics.write({"step": step - len(losses) + len(finite), "losses": finite})
        good = [path for path in checkpoints(self.output) if step_of(path) < self.loss_watch.sound]
        told = f"the last good checkpoint is {good[0]}" if good else "there is no checkpoint from well before that"
        return DivergedError(f"{error}; {told}")

    def _head_load(self) -> dict[str, float]:
        """Over all micro batches and processes of the step."""
        loads, self._loads = self._loads, []
        if self.routing is None or not loads:
            return {}
        layers = (torch.stack(layer).mean(0) for layer in zip(*loads, strict=True))
        reduced = (self.accelerator.reduce(layer, "mean") for layer in layers)
        return extremes(dict(zip(self.routing.layers, reduced, strict=True)))

    def _losses(self) -> list[float]:
        """Of the steps since the last log."""
        by_step = torch.stack(self._step_losses).view(-1, self.args.gradient_accumulation_steps).sum(1)
        self._step_losses = []
        return self.accelerator.reduce(by_step.float(), "mean").tolist()
