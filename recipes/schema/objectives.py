"""The section `objective` of a recipe: one class for each value of its `name`.

Data, loss and scores of each objective are in `trainer/objectives.py`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from crosshead.common.errors import RecipeError

from .sections import DataSource, Flag, Fraction, NotNegative, Section, Share

TOKENS, SAMPLES = "tokens", "samples"
"""The units of `train.tokens` and `train.samples`."""
Part = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class ObjectiveOptions(Section):
    """The properties of all objectives."""

    name: str
    unit: ClassVar[str] = TOKENS
    """The unit of the training's length and of a step's size."""
    kinds: ClassVar[tuple[str, ...]] = ("text", "jsonl", "parquet", "hub")
    """The kinds of sources that have its data."""
    loader: ClassVar[str] = ""

    @property
    def auto_class(self) -> str:
        """The Auto class that loads the model; empty for a model of diffusers."""
        return self.loader


@dataclass(frozen=True)
class NextToken(ObjectiveOptions):
    """A decoder predicts the next token."""

    name: Literal["next_token"] = "next_token"
    loader: ClassVar[str] = "AutoModelForCausalLM"


@dataclass(frozen=True)
class MaskedTokens(ObjectiveOptions):
    """An encoder predicts masked tokens, as BERT; with `segments: order` also the order of two segments, as ALBERT."""

    name: Literal["masked_tokens"] = "masked_tokens"
    share: Part = 0.15
    """Of the tokens, those that are predicted: 80% of them are masked, 10% replaced, and 10% left as they are."""
    segments: Literal["none", "order"] = "none"
    """order: each sequence is two consecutive segments, in half of the sequences swapped."""

    @property
    def auto_class(self) -> str:
        """That of encoders with one head, or with a second one for the order."""
        return "AutoModelForPreTraining" if self.segments == "order" else "AutoModelForMaskedLM"


@dataclass(frozen=True)
class Spans(ObjectiveOptions):
    """An encoder and a decoder predict spans that were cut out of a text, as T5."""

    name: Literal["spans"] = "spans"
    loader: ClassVar[str] = "AutoModelForSeq2SeqLM"
    share: Part = 0.15
    """Of the text's tokens, those that are cut out."""
    mean_length: Annotated[float, Field(ge=1)] = 3.0
    """Tokens of a span."""


@dataclass(frozen=True)
class Classes(ObjectiveOptions):
    """A vision transformer predicts the class of an image."""

    name: Literal["classes"] = "classes"
    loader: ClassVar[str] = "AutoModelForImageClassification"
    unit: ClassVar[str] = SAMPLES
    kinds: ClassVar[tuple[str, ...]] = ("images", "hub")
    label_smoothing: Fraction = 0.0
    """The part of a target that is spread over all classes."""
    mixup: NotNegative = 0.0
    """The parameter of the beta distribution of shares in mixup; 0 for none. Each image is mixed with the next one."""
    cutmix: NotNegative = 0.0
    """The same parameter for CutMix. With both, each pair of images gets one of the two at random."""
    crop: Annotated[float, Field(gt=0, le=1)] = 0.08
    """The smallest area of a random crop, as a share of the image."""
    flip: Flag = True
    """Mirror half of the images."""
    operations: Annotated[int, Field(ge=0)] = 0
    """RandAugment operations on each image."""
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """Magnitude of each RandAugment operation, 0 to 10."""
    erasing: Share = 0.0
    """The share of the images in which a random box is replaced by noise."""
    image_column: str = "image"
    """The column of images in a dataset of the Hub."""
    label_column: str = "label"
    """The column of classes."""
    new_classifier: Flag = False
    """Start with a new classification layer for the classes of the data, whatever classes `model.path` has."""


@dataclass(frozen=True)
class Noise(ObjectiveOptions):
    """A diffusion transformer (DiT) predicts the noise in images, or in their latents if `model.vae` is given."""

    name: Literal["noise"] = "noise"
    unit: ClassVar[str] = SAMPLES
    kinds: ClassVar[tuple[str, ...]] = ("images", "hub")
    flip: Flag = True
    """Mirror half of the images; not for digits or letters."""
    image_column: str = "image"
    """The column of images in a dataset of the Hub."""
    label_column: str = "label"
    """The column of classes."""


OBJECTIVES: dict[str, type[ObjectiveOptions]] = {
    "next_token": NextToken,
    "masked_tokens": MaskedTokens,
    "spans": Spans,
    "classes": Classes,
    "noise": Noise,
}
"""Name -> section."""
NEXT_TOKEN = NextToken()
"""The default."""


def _read_default(content: Any) -> Any:
    return {"name": NEXT_TOKEN.name} if content is None else content


AnyObjective = Annotated[
    NextToken | MaskedTokens | Spans | Classes | Noise, Field(discriminator="name"), BeforeValidator(_read_default)
]


def check_unit(objective: ObjectiveOptions, given: dict[str, int | None]) -> None:
    """The recipe says how long to train in the objective's unit alone; `given` are four keys of `train`."""
    for key, value in given.items():
        counted = key.removeprefix("batch_") == objective.unit
        if counted and value is None:
            raise RecipeError(f"train lacks the key {key!r}: the objective {objective.name} counts {objective.unit}")
        if not counted and value is not None:
            raise RecipeError(
                f"train.{key}={value}: the objective {objective.name} counts {objective.unit}: give train."
                f"{objective.unit} and train.batch_{objective.unit}"
            )


def check_sources(objective: ObjectiveOptions, sources: tuple[DataSource, ...]) -> None:
    """Each source has data for the objective, and no options without effect."""
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


def check_classifier(objective: ObjectiveOptions, path: str | None) -> None:
    """Only a model that is continued can get another classification layer."""
    if isinstance(objective, Classes) and objective.new_classifier and path is None:
        raise RecipeError(
            "objective.new_classifier=true has no effect on a model from scratch: leave it out, or give model.path"
        )


def check_pairs(objective: ObjectiveOptions, micro_batch: int) -> None:
    """Images that are mixed in pairs need an even micro batch."""
    if isinstance(objective, Classes) and (objective.mixup or objective.cutmix) and micro_batch % 2:
        raise RecipeError(
            f"train.micro_batch={micro_batch} is odd, but mixup and cutmix mix pairs of images: use an even number"
        )
