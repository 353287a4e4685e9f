"""The sections of a recipe, which pydantic fills from YAML.

Code that makes a section itself gets no check of types and ranges, only those of `__post_init__`. Their messages begin
with the name of a field.
"""

from dataclasses import dataclass, field, fields
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, model_validator

from crosshead.common.errors import RecipeError
from crosshead.common.model_places import is_hub_id
from crosshead.common.yaml_text import NULL, typed

_INTEGER: Any = {"type": ["integer", "string"], "pattern": "^[0-9][0-9_]*$"}
"""For editors, which read 65_536 as a string."""
Count = Annotated[int, Field(ge=1, le=2**63 - 1, json_schema_extra=_INTEGER)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Flag = Annotated[bool, BeforeValidator(typed), Strict()]
PathOrId = Annotated[str, AfterValidator(expanduser)]
Json = Annotated[dict[str, Any], BeforeValidator(typed)]


@dataclass(frozen=True)
class Section:
    """A part of a recipe; an unknown key is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, str_min_length=1
    )

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, content: Any) -> Any:
        """YAML's null, as text, becomes None; a section without any value gets its defaults."""
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
"""Kind of source -> options without an effect on it."""


@dataclass(frozen=True)
class DataSource(Section):
    """A source of documents."""

    path: str
    """A file, a folder (all its files of this kind, at any depth) or a pattern such as `books/**/*.md`; of the kind
    "hub" the name of a dataset on the Hub, or a folder with a copy of one."""
    kind: Literal["text", "jsonl", "parquet", "hub", "images"] = "text"
    """text (each file is a document), jsonl (each line), parquet (each row), hub (each row), or for the classification
    of images, images (a folder with a folder of images for each class)."""
    column: str = "text"
    """The field of a line or row that contains the document: text, or a conversation (a list of messages), which the
    tokenizer's chat template writes."""
    weight: Positive = 1.0
    """The source's share of the training windows, relative to the other sources."""
    max_tokens: Count | None = None
    """Stop reading after the document that reaches this number. A longer document is an error: none is cut."""
    subset: str | None = None
    """hub: the dataset's configuration."""
    split: str = "train"
    """hub: the dataset's split."""
    revision: str | None = None
    """hub: a branch, tag or commit; by default the newest when the dataset is tokenised."""
    streaming: Flag = False
    """hub: tokenise the dataset while it is downloaded, without a local copy of its files."""

    def __post_init__(self) -> None:
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
    """The sources, and how windows of tokens are cut from them."""

    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    """The training data."""
    length: Annotated[Count, Field(ge=2)] = 2048
    """Tokens in a window."""
    separate_documents: Flag = False
    """Restart positions with each document, and allow no attention between documents."""
    held_out: Fraction = 0.0
    """The share of the sources' documents that is used for evaluation instead of training.

    The choice depends on a document's content alone: it stays the same when others are added or moved, and copies of a
    document stay together.
    """
    evaluation: tuple[DataSource, ...] = ()
    """More sources for evaluation, used as a whole."""
    cache: str = "~/.cache/crosshead/tokens"
    """The folder of tokenised sources, which later runs reuse."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that prepare samples for each process of the training: images need several for a GPU."""


@dataclass(frozen=True)
class ModelOptions(Section):
    """The model to train: `path` to continue one; otherwise `config`, to start from scratch."""

    path: PathOrId | None = None
    """A crosshead or stock model: a folder, or a Hub id with or without a revision (`organisation/model@revision`)."""
    config: Json | None = None
    """As in config.json: `model_type`, sizes, `mixers`. With a path, the expected configuration."""
    convert: str | None = None
    """The command that makes the model in `path`."""
    tokenizer: PathOrId | None = None
    """A folder or a Hub id, as `path`; by default that of `path`."""
    vae: PathOrId | None = None
    """For the objective `noise`, an autoencoder (AutoencoderKL) whose latents are learned: a folder or a Hub id."""

    def __post_init__(self) -> None:
        if self.path is None and self.config is None:
            raise RecipeError("path is missing: name a model to continue, or give `config` to start one from scratch")


@dataclass(frozen=True)
class LoraOptions(Section):
    """LoRA on the stock projections (query, key, value, output, gate, up, down; those of MLA)."""

    rank: Count
    alpha: Positive
    dropout: Fraction = 0.0


@dataclass(frozen=True)
class MechanismOptions(Section):
    """The optimizer's settings for the parameters of mechanisms."""

    learning_rate: Positive | None = None
    """The highest; by default that of `train`. The schedule is the same."""
    weight_decay: NotNegative = 0.0
    """Decay would shrink maps that start as the identity, and the lambdas of `differential`, towards zero."""


@dataclass(frozen=True)
class TrainOptions(Section):
    """Optimizer, schedule, batch size and length of the training."""

    learning_rate: Positive
    """The highest."""
    tokens: Count | None = None
    """Of the whole training; if the data have fewer, they are used for several epochs."""
    batch_tokens: Count | None = None
    """Per step, over all processes and accumulated micro batches: a multiple of `data.length`."""
    samples: Count | None = None
    """Instead of tokens, for an objective that counts samples."""
    batch_samples: Count | None = None
    """Per step."""
    micro_batch: Count = 1
    """Sequences of one process in one forward pass."""
    trainable: Literal["all", "mixers", "mixers+lora"] = "all"
    lora: LoraOptions | None = None
    """For `mixers+lora`."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warmup."""
    final_ratio: Share = 0.1
    """The end of `cosine`, as a share of `learning_rate`."""
    warmup: NotNegative = 0.0
    """Steps; below 1, a share of all steps."""
    warmup_from: NotNegative = 0.0
    """The learning rate before the first step."""
    weight_decay: NotNegative = 0.1
    """Weight decay of all parameters except mechanisms, norms and biases."""
    mechanisms: MechanismOptions = field(default_factory=MechanismOptions)
    betas: Annotated[tuple[Fraction, ...], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    eps: Positive = 1e-8
    gradient_clipping: NotNegative = 1.0
    """The maximum norm of the gradient; 0 for no limit."""
    average: Decay | None = None
    """The decay of an exponential moving average of the weights, which is evaluated and becomes the result."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the computation; weights and optimizer state stay in float32."""
    expert_bias_rate: Positive | None = None
    """For a model with `expert_bias`: the change of the router's biases in each step."""
    checkpoint_activations: Flag = False
    """Less memory, a third more time."""
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
        """The highest learning rate of mechanisms."""
        return self.mechanisms.learning_rate or self.learning_rate


@dataclass(frozen=True)
class Distillation(Section):
    """Distillation from the model that this one was converted from."""

    teacher: PathOrId | None = None
    """A folder or a Hub id, as `model.path`: a model that runs during the training."""
    logits: PathOrId | None = None
    """Instead of a teacher, a folder with its highest logits for the same data."""
    weight: Share = 0.5
    """Weight w of the KL divergence from the teacher; the next-token loss has the weight 1 - w."""
    temperature: Positive = 1.0
    match_steps: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """First steps, in which each layer's attention output is fitted to the teacher's instead."""
    transfer_steps: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Steps before these, in which attention reads the teacher's inputs, and nothing but attention is trained."""

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
    """Steps between evaluations on held-out text; the last step is always evaluated."""
    report_to: tuple[str, ...] = ()
    """Trackers by their names in transformers' Trainer, as in [trackio]."""


@dataclass(frozen=True)
class CheckpointOptions(Section):
    """Checkpoints of the run."""

    every: Count = 500
    """Steps."""
    keep: Count = 2
    """The newest checkpoints to keep."""


@dataclass(frozen=True)
class HubOptions(Section):
    """The upload of the trained model."""

    repo: str
    """A name such as organisation/model; created if it does not exist."""
    private: Flag = True

    def __post_init__(self) -> None:
        if not is_hub_id(self.repo):
            raise RecipeError(f"repo={self.repo!r} is not a Hub name: use one such as organisation/model")


@dataclass(frozen=True)
class SweepOptions(Section):
    """The runs of `crosshead sweep`."""

    learning_rates: tuple[Positive, ...]

    def __post_init__(self) -> None:
        if len({f"{rate:g}" for rate in self.learning_rates}) < max(2, len(self.learning_rates)):
            raise RecipeError(f"learning_rates={list(self.learning_rates)}: give two or more different ones")
