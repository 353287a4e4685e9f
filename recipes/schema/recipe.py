"""What a recipe says: one frozen dataclass a section, nothing in it that no recipe uses.

The loss is always the next token's, with the balance losses that the model's own configuration asks for. Paths are
read from where the command runs.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported when it is first used

from crosshead.common.errors import RecipeError

from ..data.sampling_order import Turns
from .data_options import DataOptions
from .model_config import check_expert_bias, check_length, model_config
from .text_values import Beta, Count, NotNegative, Positive, Seed, Share, Whole


@dataclass(frozen=True)
class ModelOptions:
    """What is trained: `path` is continued; without it, `config` is started from scratch."""

    path: str | None = None
    """A crosshead or stock model: a folder or a Hub id."""
    config: dict[str, Any] | None = None
    """As in config.json: `model_type`, sizes, `mixers`. Beside a path, what is expected to be there."""
    convert: str | None = None
    """The command that makes `path`."""
    tokenizer: str | None = None
    """A folder or a Hub id; that of `path` if not given."""

    def __post_init__(self) -> None:
        """Something to train, and something to read text with."""
        if self.path is None and self.config is None:
            raise RecipeError("path is missing: name a model to continue, or give `config` to start one from scratch")
        if self.path is None and self.tokenizer is None:
            raise RecipeError("tokenizer is missing: a model from scratch brings none")


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank changes to the stock projections (query, key, value, output, gate, up, down)."""

    rank: Count
    alpha: Positive
    dropout: Share = 0.0


@dataclass(frozen=True)
class MechanismOptions:
    """How the optimizer treats the parameters of mechanisms."""

    learning_rate: Positive | None = None
    """The highest; that of `train` if not given. The schedule is the same."""
    weight_decay: NotNegative = 0.0
    """Decay would pull maps that start at the identity, and the lambdas of `differential`, towards zero."""


@dataclass(frozen=True)
class TrainOptions:
    """What moves, how far and how long."""

    learning_rate: Positive
    """The highest."""
    tokens: Count
    """Of training in all; more than the data holds means several epochs."""
    batch_tokens: Count
    """Per step, over all processes and accumulated micro batches: a multiple of `data.length`."""
    micro_batch: Count = 1
    """Sequences that one process runs at once."""
    trainable: Literal["all", "mixers", "mixers+lora"] = "all"
    lora: LoraOptions | None = None
    """For `mixers+lora`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warmup."""
    final_ratio: Share = 0.1
    """Where `cosine` ends, as part of `learning_rate`."""
    warmup: NotNegative = 0.0
    """Steps, or below 1 the part of all steps."""
    warmup_from: NotNegative = 0.0
    """The learning rate before the first step."""
    weight_decay: NotNegative = 0.1
    """Of all but mechanisms, norms and biases."""
    mechanisms: MechanismOptions = field(default_factory=MechanismOptions)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Positive = 1e-8
    gradient_clipping: NotNegative = 1.0
    """The largest norm of the gradient; 0 means any."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the arithmetic; weights and optimizer stay float32."""
    expert_bias_rate: Positive | None = None
    """For a model with `expert_bias`: how far the biases by which routers choose experts move in each step."""
    checkpoint_activations: bool = False
    """Less memory, a third more time."""
    seed: Seed = 0

    def __post_init__(self) -> None:
        """LoRA where it is asked for, a warmup that leads up, and steps that are whole."""
        if (self.trainable == "mixers+lora") != (self.lora is not None):
            raise RecipeError(
                f"trainable={self.trainable!r} "
                + ("has no use for `lora`: leave it out" if self.lora else "needs `lora`: give rank and alpha")
            )
        if self.lora and self.expert_bias_rate is not None:
            raise RecipeError(
                f"expert_bias_rate={self.expert_bias_rate:g} is not for trainable={self.trainable!r}, whose "
                "checkpoints hold no biases: leave it out"
            )
        if self.warmup_from > self.learning_rate:
            raise RecipeError(f"warmup_from={self.warmup_from} is above learning_rate={self.learning_rate}: lower it")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise RecipeError(f"warmup={self.warmup} is no whole number of steps; a part of all lies below 1")

    @property
    def mechanism_rate(self) -> float:
        """The highest learning rate of mechanisms."""
        return self.mechanisms.learning_rate or self.learning_rate


@dataclass(frozen=True)
class Distillation:
    """Learning from the model that this one was made from."""

    teacher: str | None = None
    """A folder or a Hub id: runs beside the model."""
    logits: str | None = None
    """Instead, a folder with the teacher's highest logits for the same data."""
    weight: Share = 0.5
    """Of the divergence from the teacher; the next token's loss has the rest."""
    temperature: Positive = 1.0
    match_steps: Whole = 0
    """First steps, in which each layer's attention output is fitted to the teacher's instead."""

    def __post_init__(self) -> None:
        """One teacher, and a live one where its attention is to be matched."""
        if (self.teacher is None) == (self.logits is None):
            raise RecipeError(
                f"teacher={self.teacher}, logits={self.logits}: give one of the two, a model or a folder of its logits"
            )
        if self.logits is not None and self.temperature != 1:
            raise RecipeError(f"temperature={self.temperature:g} needs `teacher`: `logits` are stored for 1")
        if self.logits is not None and self.match_steps:
            raise RecipeError(f"match_steps={self.match_steps} needs `teacher`: `logits` hold no attention")


@dataclass(frozen=True)
class WatchOptions:
    """What is told while a run goes on."""

    every: Count = 10
    """Steps between logged metrics."""
    evaluate_every: Count | None = None
    """Steps between evaluations on held-out text; at the end in any case."""
    report_to: tuple[str, ...] = ()
    """Trackers that transformers' Trainer knows by name, as [trackio]."""


@dataclass(frozen=True)
class CheckpointOptions:
    """What is kept of a run."""

    every: Count = 500
    """Steps."""
    keep: Count = 2


@dataclass(frozen=True)
class HubOptions:
    """Where the trained model is pushed at the end."""

    repo: str
    """A name such as organisation/model; made if it is not there yet."""
    private: bool = True

    def __post_init__(self) -> None:
        """Found out before the training."""
        try:
            validate_repo_id(self.repo)
        except HFValidationError:
            raise RecipeError(
                f"repo={self.repo!r} is no name for the Hub: use one such as organisation/model"
            ) from None


@dataclass(frozen=True)
class SweepOptions:
    """What `crosshead sweep` tries."""

    learning_rates: tuple[Positive, ...]

    def __post_init__(self) -> None:
        """Something to compare, in folders of their own."""
        if len({f"{rate:g}" for rate in self.learning_rates}) < max(2, len(self.learning_rates)):
            raise RecipeError(f"learning_rates={list(self.learning_rates)}: give two or more different ones")


@dataclass(frozen=True)
class Recipe:
    """A whole training run."""

    output: str
    """The folder for checkpoints, metrics and, at the end, the model."""
    model: ModelOptions
    data: DataOptions
    train: TrainOptions
    distillation: Distillation | None = None
    watch: WatchOptions = field(default_factory=WatchOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    hub: HubOptions | None = None
    sweep: SweepOptions | None = None

    def __post_init__(self) -> None:
        """Sections that fit each other, and a configuration that a model can be made of."""
        length, train = self.data.length, self.train
        if train.batch_tokens % length:
            nearest = max(1, (train.batch_tokens + length // 2) // length) * length
            raise RecipeError(
                f"train.batch_tokens={train.batch_tokens} is no multiple of data.length={length}: "
                f"the nearest is {nearest}"
            )
        if self.batch_size % train.micro_batch:
            raise RecipeError(
                f"train.micro_batch={train.micro_batch} does not divide the {self.batch_size} sequences of a step"
            )
        if train.warmup and self.warmup_steps >= self.steps:
            raise RecipeError(
                f"train.warmup={train.warmup:g} leaves nothing after it: train.tokens={train.tokens} are "
                f"{self.steps} steps of train.batch_tokens={train.batch_tokens}"
            )
        if self.watch.evaluate_every and not (self.data.held_out or self.data.evaluation):
            raise RecipeError(
                f"watch.evaluate_every={self.watch.evaluate_every} has no text to evaluate on: set data.held_out or "
                "data.evaluation, or leave it out"
            )
        Turns([source.weight for source in self.data.sources])  # or it is refused when all are tokenised
        if self.model.config is not None:
            config = model_config(self.model.config)
            check_expert_bias(config, train.expert_bias_rate)
            check_length(config, length)

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        return self.train.batch_tokens // self.data.length

    @property
    def steps(self) -> int:
        """Of training in all."""
        return -(-self.train.tokens // self.train.batch_tokens)

    @property
    def warmup_steps(self) -> int:
        """Of the steps."""
        warmup = self.train.warmup
        return round(warmup * self.steps) if warmup < 1 else int(warmup)
