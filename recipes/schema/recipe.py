"""A whole recipe: its sections, and the checks that involve several sections.

The loss is the loss of the objective plus the load-balancing losses that the model's configuration enables. Paths
are relative to the working directory.
"""

import sys
from dataclasses import dataclass, field

from crosshead.common.errors import RecipeError

from ..data.sampling_order import SourceOrder
from . import sections
from .field_types import PathOrId
from .model_config import check_expert_bias, model_config
from .objectives import (
    NEXT_TOKEN,
    TOKENS,
    AnyObjective,
    Noise,
    check_classifier,
    check_pairs,
    check_sources,
    check_unit,
)


@dataclass(frozen=True)
class Recipe(sections.Section):
    """A whole training run."""

    output: PathOrId
    """Folder for checkpoints, metrics and the final model."""
    model: sections.ModelOptions
    data: sections.DataOptions
    train: sections.TrainOptions
    objective: AnyObjective = NEXT_TOKEN
    """Training objective: the task that the model learns, such as next-token prediction."""
    distillation: sections.Distillation | None = None
    watch: sections.WatchOptions = field(default_factory=sections.WatchOptions)
    checkpoints: sections.CheckpointOptions = field(default_factory=sections.CheckpointOptions)
    hub: sections.HubOptions | None = None
    sweep: sections.SweepOptions | None = None

    def __post_init__(self) -> None:
        self._check_objective()
        self._check_steps()
        if self.watch.evaluate_every and not self.evaluates:
            raise RecipeError(
                f"watch.evaluate_every={self.watch.evaluate_every} has no text to evaluate on: set data.held_out or "
                "data.evaluation, or leave it out"
            )
        SourceOrder([source.weight for source in self.data.sources])  # reject bad weights before the tokenisation
        if self.model.config is None:
            return
        config = model_config(self.model.config, self.objective)
        check_expert_bias(config, self.train.expert_bias_rate)
        if self.data.length > getattr(config, "max_position_embeddings", sys.maxsize):
            raise RecipeError(
                f"data.length={self.data.length} is more than model.config.max_position_embeddings="
                f"{config.max_position_embeddings}: lower it, or raise that"
            )

    def _check_objective(self) -> None:
        """Raise `RecipeError` if another section does not fit the objective."""
        name, train = self.objective.name, self.train
        check_unit(self.objective, train)
        check_sources(self.objective, self.data.sources + self.data.evaluation)
        check_pairs(self.objective, train.micro_batch)
        check_classifier(self.objective, self.model.path)
        if self.counts_tokens and self.model.path is None and self.model.tokenizer is None:
            raise RecipeError("model.tokenizer is missing: a model from scratch has none")
        is_noise = isinstance(self.objective, Noise)
        if self.model.vae is not None and not is_noise:
            raise RecipeError(f"model.vae={self.model.vae} is for the objective noise, not for {name}: leave it out")
        if is_noise and (self.model.path is not None or self.model.tokenizer is not None):
            raise RecipeError("model: the objective noise starts from `config`: leave path and tokenizer out")
        if train.trainable != "all" and (is_noise or getattr(self.objective, "new_classifier", False)):
            raise RecipeError(f"train.trainable={train.trainable!r} would leave new random weights untrained: use all")
        if is_noise and self.hub is not None:
            raise RecipeError("hub is not for the objective noise: upload the result with `hf upload`")
        if name == NEXT_TOKEN.name:
            return
        for key, is_given in {
            "distillation": self.distillation is not None,
            "data.separate_documents": self.data.separate_documents,
            "train.lora": train.lora is not None,
            "model.tokenizer": self.model.tokenizer is not None and not self.counts_tokens,
        }.items():
            if is_given:
                raise RecipeError(
                    f"{key} is for the objective {NEXT_TOKEN.name} alone, and this is {name}: leave it out"
                )

    def _check_steps(self) -> None:
        train, length = self.train, self.data.length
        if self.counts_tokens and self.per_step % length:
            nearest = max(1, (self.per_step + length // 2) // length) * length
            raise RecipeError(
                f"train.batch_tokens={self.per_step} is not a multiple of data.length={length}: "
                f"the nearest is {nearest}"
            )
        if self.batch_size % train.micro_batch:
            raise RecipeError(
                f"train.micro_batch={train.micro_batch} does not divide the {self.batch_size} sequences of a step"
            )
        if train.warmup and self.warmup_steps >= self.steps:
            unit = self.objective.unit
            raise RecipeError(
                f"train.warmup={train.warmup:g} leaves no steps after it: train.{unit}={self.total} are "
                f"{self.steps} steps of train.batch_{unit}={self.per_step}"
            )

    @property
    def counts_tokens(self) -> bool:
        """Whether the objective counts tokens rather than samples."""
        return self.objective.unit == TOKENS

    @property
    def total(self) -> int:
        """Number of tokens or samples of the whole training."""
        return (self.train.tokens if self.counts_tokens else self.train.samples) or 0

    @property
    def per_step(self) -> int:
        """Number of tokens or samples per optimizer step."""
        return (self.train.batch_tokens if self.counts_tokens else self.train.batch_samples) or 0

    @property
    def batch_size(self) -> int:
        """Number of sequences or samples per optimizer step, over all processes."""
        return self.per_step // self.data.length if self.counts_tokens else self.per_step

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return -(-self.total // self.per_step)

    @property
    def warmup_steps(self) -> int:
        """Number of steps until the learning rate reaches its peak."""
        warmup = self.train.warmup
        return round(warmup * self.steps) if warmup < 1 else int(warmup)

    @property
    def attention_loss_steps(self) -> int:
        """Number of first steps (transfer, then matching) with a loss on attention outputs instead of predictions."""
        return self.distillation.transfer_steps + self.distillation.match_steps if self.distillation else 0

    @property
    def loss_changes(self) -> tuple[int, ...]:
        """Steps after which the training loss changes to another kind."""
        return (self.distillation.transfer_steps, self.attention_loss_steps) if self.distillation else ()

    @property
    def evaluates(self) -> bool:
        """Whether there is data for evaluation."""
        return bool(self.data.held_out or self.data.evaluation)
