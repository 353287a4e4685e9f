"""The sections of a recipe, which pydantic validates and fills from YAML.

Code that constructs a section directly gets no check of types and ranges, only the checks in `__post_init__`, whose
messages begin with the name of a field.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from crosshead.common.errors import RecipeError
from crosshead.common.model_location import is_hub_id
from crosshead.common.yaml_text import NULL

from .field_types import Count, DataPath, Decay, Flag, Fraction, Json, Length, NotNegative, PathOrId, Positive, Share


@dataclass(frozen=True)
class Section:
    """Base class of the sections; an unknown key is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, str_min_length=1
    )

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, content: Any) -> Any:
        """Replace YAML's null, which arrives as text, by None; an empty section gets its defaults."""
        if content is None:
            return {}
        if isinstance(content, dict):
            return {key: None if value in NULL else value for key, value in content.items()}
        return content


HUB_OPTIONS = ("subset", "split", "revision", "streaming")
UNUSED_OPTIONS = {
    "text": ("column", *HUB_OPTIONS),
    "jsonl": HUB_OPTIONS,
    "parquet": HUB_OPTIONS,
    "hub": (),
    "images": ("column", "max_tokens", *HUB_OPTIONS),
}
"""Source kind -> options that have no effect on it."""


@dataclass(frozen=True)
class DataSource(Section):
    """A source of documents or images."""

    path: DataPath
    """A file, a folder (all its files of this kind, at any depth) or a pattern such as `books/**/*.md`. Kind hub: the
    id of a Hub dataset, or a folder with a copy. Kind images: a folder with one folder of images per class."""
    kind: Literal["text", "jsonl", "parquet", "hub", "images"] = "text"
    """text (each file is a document), jsonl (each line), parquet (each row), hub (each row of a Hub dataset: a text or
    an image), or images (image files in one folder per class)."""
    column: str = "text"
    """Field of a line or row that contains the document: text, or a conversation (a list of messages), which the
    tokenizer's chat template renders."""
    weight: Positive = 1.0
    """Sampling weight: the source's share of the training samples, relative to the other sources."""
    max_tokens: Count | None = None
    """Stop reading after the document that reaches this number of tokens. A single longer document is an error."""
    subset: str | None = None
    """hub: configuration (subset) of the dataset."""
    split: str = "train"
    """hub: split of the dataset."""
    revision: str | None = None
    """hub: branch, tag or commit; by default the newest commit at the time of tokenisation."""
    streaming: Flag = False
    """hub: tokenise the dataset while it is downloaded, without a local copy of its files."""

    def __post_init__(self) -> None:
        ending = self.path.lower().rpartition(".")[2]
        if self.kind == "text" and ending in ("json", "jsonl", "ndjson", "parquet"):
            kind = "parquet" if ending == "parquet" else "jsonl"
            raise RecipeError(f"path={self.path} would be read as plain text, the default kind: set `kind: {kind}`")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in UNUSED_OPTIONS[self.kind] and value != option.default:
                kinds = ", ".join(repr(kind) for kind, unused in UNUSED_OPTIONS.items() if option.name not in unused)
                raise RecipeError(
                    f"{option.name}={value!r} has no effect on a source of the kind {self.kind!r}: leave it out, or "
                    f"use a kind that has it ({kinds})"
                )


@dataclass(frozen=True)
class DataOptions(Section):
    """The data sources, and how training and evaluation samples are made from them."""

    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    """Sources of the training data."""
    length: Length = 2048
    """Number of tokens in a window (a training sequence)."""
    separate_documents: Flag = False
    """Restart position ids at each document of a window, and mask attention between documents."""
    held_out: Fraction = 0.0
    """Fraction of the documents or images that is used for evaluation instead of training.

    The split depends only on a document's content: it stays the same when other documents are added or moved, and
    copies of a document are always on the same side.
    """
    evaluation: tuple[DataSource, ...] = ()
    """Additional sources, used entirely for evaluation."""
    cache: DataPath = "~/.cache/crosshead/tokens"
    """Cache folder of tokenised sources, which later runs reuse."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Data loader workers of each training process; image augmentation needs several per GPU."""

    def __post_init__(self) -> None:
        for source in self.evaluation:
            if source.weight != 1:
                raise RecipeError(f"evaluation has weight={source.weight:g}, which has no effect there: leave it out")


@dataclass(frozen=True)
class ModelOptions(Section):
    """The model to train: `path` to continue from a model, or only `config` to start from scratch."""

    path: PathOrId | None = None
    """Initial model, crosshead or stock: a folder or a Hub id, optionally with a revision (`org/model@revision`)."""
    config: Json | None = None
    """Configuration with the keys of config.json (`model_type`, sizes, `mixers`); a model in `path` must have the same
    values of these keys."""
    convert: str | None = None
    """Command that creates the model in `path`; messages quote it if the model does not exist."""
    tokenizer: PathOrId | None = None
    """Tokenizer: a folder or a Hub id, as for `path`; by default the tokenizer in `path`."""
    vae: PathOrId | None = None
    """Objective noise: folder or Hub id of the autoencoder (AutoencoderKL) for whose latents the model is trained."""

    def __post_init__(self) -> None:
        if self.path is None and self.config is None:
            raise RecipeError("path is missing: name a model to continue, or give `config` to start one from scratch")


@dataclass(frozen=True)
class LoraOptions(Section):
    """LoRA on the stock projections: query, key, value, output, gate, up, down, and the latent projections of MLA."""

    rank: Count
    alpha: Positive
    dropout: Fraction = 0.0


@dataclass(frozen=True)
class MechanismOptions(Section):
    """Optimizer settings for the parameters of mechanisms."""

    learning_rate: Positive | None = None
    """Peak learning rate of mechanisms, by default `train.learning_rate`; the schedule is the same."""
    weight_decay: NotNegative = 0.0
    """Default 0: decay would pull maps that start as the identity, and the lambdas of `differential`, towards zero."""


@dataclass(frozen=True)
class TrainOptions(Section):
    """Optimizer, learning-rate schedule, batch size and length of the training."""

    learning_rate: Positive
    """Peak learning rate, reached after the warmup."""
    tokens: Count | None = None
    """Number of training tokens. If the data have fewer, they are repeated for several epochs."""
    batch_tokens: Count | None = None
    """Tokens per optimizer step over all processes and accumulated micro batches: a multiple of `data.length`."""
    samples: Count | None = None
    """Number of training samples, instead of `tokens`, for objectives that count samples (images)."""
    batch_samples: Count | None = None
    """Samples per optimizer step over all processes and accumulated micro batches, instead of `batch_tokens`."""
    micro_batch: Count = 1
    """Sequences or images per forward pass of one process."""
    trainable: Literal["all", "mixers", "mixers+lora"] = "all"
    """Trained parameters: all, only mechanisms (mixers), or mechanisms and LoRA adapters (mixers+lora)."""
    lora: LoraOptions | None = None
    """LoRA settings, required by `trainable: mixers+lora`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning-rate schedule after the warmup."""
    final_ratio: Share = 0.1
    """Final learning rate of `cosine`, as a fraction of `learning_rate`."""
    warmup: NotNegative = 0.0
    """Number of warmup steps; below 1, the fraction of all steps."""
    warmup_from: NotNegative = 0.0
    """Learning rate from which the linear warmup starts."""
    weight_decay: NotNegative = 0.1
    """Weight decay of all parameters except mechanisms, norms and biases."""
    mechanisms: MechanismOptions = field(default_factory=MechanismOptions)
    betas: Annotated[tuple[Fraction, ...], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    eps: Positive = 1e-8
    gradient_clipping: NotNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    average: Decay | None = None
    """Decay of an exponential moving average (EMA) of the weights, which is evaluated and saved as the result."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype; weights and optimizer state stay in float32."""
    expert_bias_rate: Positive | None = None
    """Models with `expert_bias`: amount by which each step changes the router biases (loss-free load balancing)."""
    checkpoint_activations: Flag = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, about a third more time."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    def __post_init__(self) -> None:
        if (self.trainable == "mixers+lora") != (self.lora is not None):
            advice = "does not use `lora`: leave it out" if self.lora else "needs `lora`: give rank and alpha"
            raise RecipeError(f"trainable={self.trainable!r} {advice}")
        if self.lora and self.expert_bias_rate is not None:
            raise RecipeError(
                f"expert_bias_rate={self.expert_bias_rate:g} is not possible with trainable={self.trainable!r}, whose "
                "checkpoints contain no biases: leave it out"
            )
        if self.warmup_from > self.learning_rate:
            raise RecipeError(f"warmup_from={self.warmup_from} is above learning_rate={self.learning_rate}: lower it")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise RecipeError(f"warmup={self.warmup} is not a whole number of steps: use one, or a share below 1")

    @property
    def mechanism_rate(self) -> float:
        """Peak learning rate of the parameters of mechanisms."""
        return self.mechanisms.learning_rate or self.learning_rate


@dataclass(frozen=True)
class Distillation(Section):
    """Distillation from a teacher, usually the stock model that the trained model was converted from."""

    teacher: PathOrId | None = None
    """Teacher model, which runs during the training: a folder or a Hub id, as for `model.path`."""
    logits: PathOrId | None = None
    """Instead of `teacher`: folder with the teacher's stored top-k log-probabilities for the same data and seed."""
    weight: Share = 0.5
    """Weight w of the KL divergence from the teacher; the next-token loss has weight 1 - w."""
    temperature: Positive = 1.0
    """Temperature T of both distributions in the KL divergence, which is multiplied by T squared."""
    match_steps: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Steps after `transfer_steps` whose only loss is the error of each attention output against the teacher's."""
    transfer_steps: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """First steps: only attention layers are trained, on the teacher's attention inputs and outputs."""

    def __post_init__(self) -> None:
        if (self.teacher is None) == (self.logits is None):
            raise RecipeError(
                f"teacher={self.teacher}, logits={self.logits}: give one of the two, a model or a folder of its logits"
            )
        if self.logits is not None and self.temperature != 1:
            raise RecipeError(f"temperature={self.temperature:g} needs `teacher`: `logits` are stored for 1")
        for name in ("match_steps", "transfer_steps"):
            if self.logits is not None and getattr(self, name):
                raise RecipeError(
                    f"{name}={getattr(self, name)} needs `teacher`: `logits` contain no attention outputs"
                )


@dataclass(frozen=True)
class WatchOptions(Section):
    """Logging and evaluation."""

    every: Count = 10
    """Steps between logged metrics."""
    evaluate_every: Count | None = None
    """Steps between evaluations on held-out data. The last step is always evaluated, by default only the last step."""
    report_to: tuple[str, ...] = ()
    """Experiment trackers by their names in transformers' Trainer, for example [trackio]."""


@dataclass(frozen=True)
class CheckpointOptions(Section):
    """Checkpoints of the run."""

    every: Count = 500
    """Steps between checkpoints."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""


@dataclass(frozen=True)
class HubOptions(Section):
    """Upload of the trained model to the Hub."""

    repo: str
    """Hub repository such as organisation/model; created if it does not exist."""
    private: Flag = True

    def __post_init__(self) -> None:
        if not is_hub_id(self.repo):
            raise RecipeError(f"repo={self.repo!r} is not a Hub name: use one such as organisation/model")


@dataclass(frozen=True)
class SweepOptions(Section):
    """The learning-rate sweep of `crosshead sweep`."""

    learning_rates: tuple[Positive, ...]
    """Two or more values of `train.learning_rate`, one run each."""

    def __post_init__(self) -> None:
        if len({f"{rate:g}" for rate in self.learning_rates}) < max(2, len(self.learning_rates)):
            raise RecipeError(f"learning_rates={list(self.learning_rates)}: give two or more different ones")
