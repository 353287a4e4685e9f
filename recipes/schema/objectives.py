"""The recipe section `objective`: one options class per value of its key `name`.

`trainer/objectives.py` has the data, loss and metrics of each objective.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from crosshead.common.errors import RecipeError

from .field_types import Flag, Fraction, NotNegative, Share
from .sections import DataSource, Section, TrainOptions

TOKENS, SAMPLES = "tokens", "samples"
"""Units in which an objective counts the training length and the batch size, see `ObjectiveOptions.unit`."""
Part = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class ObjectiveOptions(Section):
    """Base class of the options of all objectives."""

    name: str
    unit: ClassVar[str] = TOKENS
    """Unit of the training length and of the batch size: `train` then has the keys `tokens` and `batch_tokens`, or
    `samples` and `batch_samples`."""
    kinds: ClassVar[tuple[str, ...]] = ("text", "jsonl", "parquet", "hub")
    """Values of `DataSource.kind` that the objective can train on."""
    auto_class: ClassVar[str] = ""
    """Name of the transformers Auto class that loads the model; empty for a diffusers model."""


@dataclass(frozen=True)
class NextToken(ObjectiveOptions):
    """A decoder predicts the next token."""

    name: Literal["next_token"] = "next_token"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"


@dataclass(frozen=True)
class MaskedTokens(ObjectiveOptions):
    """An encoder predicts masked tokens (BERT) and, with `segments: order`, the order of two segments (ALBERT)."""

    name: Literal["masked_tokens"] = "masked_tokens"
    share: Part = 0.15
    """Fraction of the tokens that are predicted; of these, 80% are masked, 10% replaced and 10% left unchanged."""
    segments: Literal["none", "order"] = "none"
    """order: each sequence consists of two consecutive segments, which are swapped in half of the sequences."""

    @property
    def auto_class(self) -> str:  # type: ignore[override]  # it depends on a field
        """Auto class of encoders with a language-modeling head, or with a second head for the segment order."""
        return "AutoModelForPreTraining" if self.segments == "order" else "AutoModelForMaskedLM"


@dataclass(frozen=True)
class Spans(ObjectiveOptions):
    """An encoder-decoder predicts spans that were cut out of a text (span corruption, as T5)."""

    name: Literal["spans"] = "spans"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    share: Part = 0.15
    """Fraction of the text's tokens that are cut out."""
    mean_length: Annotated[float, Field(ge=1)] = 3.0
    """Mean number of tokens in a span."""


@dataclass(frozen=True)
class Classes(ObjectiveOptions):
    """A vision transformer predicts the class of an image."""

    name: Literal["classes"] = "classes"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    unit: ClassVar[str] = SAMPLES
    kinds: ClassVar[tuple[str, ...]] = ("images", "hub")
    label_smoothing: Fraction = 0.0
    """Fraction of the target probability that is spread evenly over all classes."""
    mixup: NotNegative = 0.0
    """Alpha of the Beta(alpha, alpha) distribution of mixup weights; 0 disables mixup. Images are mixed in pairs."""
    cutmix: NotNegative = 0.0
    """Alpha of the Beta(alpha, alpha) distribution of CutMix areas; 0 disables CutMix. With both methods, each pair
    of images gets one of the two at random."""
    crop: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Minimum area of a random crop, as a fraction of the image."""
    flip: Flag = True
    """Mirror half of the training images horizontally."""
    operations: Annotated[int, Field(ge=0)] = 0
    """Number of RandAugment operations on each image."""
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """Magnitude of each RandAugment operation, 0 to 10."""
    erasing: Share = 0.0
    """Probability that a random box of an image is replaced by noise (random erasing)."""
    image_column: str = "image"
    """The column of images in a dataset of the Hub."""
    label_column: str = "label"
    """The column of classes."""
    new_classifier: Flag = False
    """Replace the classification layer of `model.path` by a new one for the classes of the data."""


@dataclass(frozen=True)
class Noise(ObjectiveOptions):
    """A diffusion transformer (DiT) predicts the noise in images, or in their latents if `model.vae` is given."""

    name: Literal["noise"] = "noise"
    unit: ClassVar[str] = SAMPLES
    kinds: ClassVar[tuple[str, ...]] = ("images", "hub")
    flip: Flag = True
    """Mirror half of the training images horizontally; set to false for digits or letters."""
    image_column: str = "image"
    """The column of images in a dataset of the Hub."""
    label_column: str = "label"
    """The column of classes."""


OBJECTIVES: dict[str, type[ObjectiveOptions]] = {
    kind.name: kind for kind in (NextToken, MaskedTokens, Spans, Classes, Noise)
}
"""Value of `name` -> options class."""
NEXT_TOKEN = NextToken()
"""The default objective."""


def _read_default(content: Any) -> Any:
    return {"name": NEXT_TOKEN.name} if content is None else content


AnyObjective = Annotated[
    NextToken | MaskedTokens | Spans | Classes | Noise, Field(discriminator="name"), BeforeValidator(_read_default)
]


def check_unit(objective: ObjectiveOptions, train: TrainOptions) -> None:
    """Raise `RecipeError` unless `train` gives its length and batch size in the objective's unit, and only in it."""
    for key in ("tokens", "batch_tokens", "samples", "batch_samples"):
        value = getattr(train, key)
        counted = key.removeprefix("batch_") == objective.unit
        if counted and value is None:
            raise RecipeError(f"train lacks the key {key!r}: the objective {objective.name} counts {objective.unit}")
        if not counted and value is not None:
            raise RecipeError(
                f"train.{key}={value}: the objective {objective.name} counts {objective.unit}: give train."
                f"{objective.unit} and train.batch_{objective.unit}"
            )


def check_sources(objective: ObjectiveOptions, sources: tuple[DataSource, ...]) -> None:
    """Raise `RecipeError` if a source has the wrong kind for the objective, or an option that has no effect."""
    for source in sources:
        if source.kind not in objective.kinds:
            raise RecipeError(
                f"the source {source.path} of kind={source.kind!r} has no data for the objective {objective.name}: "
                f"use one of {', '.join(objective.kinds)}"
            )
        for key in ("max_tokens", "streaming") if objective.unit == SAMPLES else ():
            if getattr(source, key):
                raise RecipeError(
                    f"{key}={getattr(source, key)} of the source {source.path} has no effect with the objective "
                    f"{objective.name}: leave it out"
                )


def check_classes(objective: Classes, path: str | None, micro_batch: int) -> None:
    """Raise `RecipeError` if an option of image classification has no effect, or does not fit the micro batch."""
    if (objective.mixup or objective.cutmix) and micro_batch % 2:
        raise RecipeError(
            f"train.micro_batch={micro_batch} is odd, but mixup and cutmix mix pairs of images: use an even number"
        )
    if objective.new_classifier and path is None:  # a model from scratch has a new classifier anyway
        raise RecipeError(
            "objective.new_classifier=true has no effect on a model from scratch: leave it out, or give model.path"
        )
