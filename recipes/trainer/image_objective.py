"""Objective of image classification, with soft targets for mixed images."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import RecipeError, one_line
from crosshead.common.images import MODES, check_shape, open_processor
from crosshead.common.progress import Progress
from crosshead.modeling.encoder import image_shape

from ..data.augmentation import Augmentation
from ..data.image_mixing import OTHER_LABELS, SHARES, MixImages
from ..data.image_sources import require_pillow
from ..data.images import ImageInputs, ProcessImage, find_images, image_processor, read_images, renumber
from ..data.training_data import TrainingData
from ..schema.model_config import CLASS_COUNT
from .loading import initial_config
from .objective import LABELS, Objective, Predictions


@dataclass(frozen=True)
class SoftPredictions(Predictions):
    """Predictions for images that were mixed in pairs by mixup or CutMix."""

    other_labels: torch.Tensor
    """Class of each image's partner (B)."""
    shares: torch.Tensor
    """Weight of each image's own class (B)."""
    smoothing: float
    """Label smoothing: fraction of the target that is spread over all classes (Szegedy et al., 2016)."""

    @property
    def losses(self) -> torch.Tensor:
        """Cross-entropy of each image (B): the mean over its two classes, weighted by their shares."""
        own, other = (
            functional.cross_entropy(self.logits.float(), labels, reduction="none", label_smoothing=self.smoothing)
            for labels in (self.labels, self.other_labels)
        )
        return self.shares * own + (1 - self.shares) * other


class Classes(Objective):
    """An image classifier predicts the class of each image."""

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the model's input images."""
        return image_shape(initial_config(self.recipe))

    def load_processor(self) -> ImageInputs:
        """Load the image processor, and open the image sources with their classes."""
        require_pillow()
        channels, height, width = self.shape
        path = self.recipe.model.path
        if channels not in MODES:
            raise RecipeError(f"the model reads images with {channels} channels, and only 1 or 3 are supported")
        if path is None and height != width:
            raise RecipeError(f"model.config has image_size=[{height}, {width}]: use one number, for square images")
        options, columns = self.options, (self.options.image_column, self.options.label_column)
        if path is None:
            return find_images(self.recipe.data, columns, image_processor(height, channels, options.crop), channels)
        place = f"of model.path={path}"
        inputs = find_images(self.recipe.data, columns, open_processor(path, place, RecipeError), channels)
        check_processor(inputs, self.shape, place)
        return inputs

    def complete_config(self, config: Any, processor: ImageInputs) -> None:
        """Set the class names of the data; raise `RecipeError` if `model.config` has another number of classes."""
        if CLASS_COUNT in (self.recipe.model.config or {}):
            check_count(config.num_labels, "model.config", processor.classes)
        config.update(class_names(processor.classes))

    def new_head(self, processor: ImageInputs) -> dict[str, Any]:
        """Return the class names of the data if `new_classifier` is set, otherwise no changes."""
        return class_names(processor.classes) if self.options.new_classifier else {}

    def open_data(self, processor: ImageInputs, config: Any, progress: Progress) -> TrainingData:
        """Open the augmented images, with the model's class indices if the data have the model's classes.

        Otherwise the model's configuration gets the class names of the data.
        """
        check_count(config.num_labels, f"model.path={self.recipe.model.path}", processor.classes)
        keep_numbers(processor, [str(config.id2label[number]) for number in range(config.num_labels)])
        config.update(class_names(processor.classes))
        training = ProcessImage(processor, Augmentation(self.shape[1:], self.options))
        return read_images(self.recipe.data, processor, progress).prepared(training, ProcessImage(processor, None))

    def example(self, config: Any, rows: int) -> dict[str, Any]:
        """Return blank images."""
        return {"pixel_values": torch.zeros(rows, *image_shape(config))}

    def logits(self, config: Any) -> int:
        """Return the number of classes."""
        return int(config.num_labels)

    @property
    def collator(self) -> MixImages:
        """Data collator that mixes images in pairs."""
        return MixImages(self.options.mixup, self.options.cutmix)

    def predictions(self, outputs: Any, inputs: dict[str, Any]) -> list[Predictions]:
        """Return one prediction per image, with soft targets in training."""
        if SHARES not in inputs:
            return super().predictions(outputs, inputs)
        labels, others, shares = (inputs[name] for name in (LABELS, OTHER_LABELS, SHARES))
        return [SoftPredictions("", outputs["logits"], labels, others, shares, self.options.label_smoothing)]

    def model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return only the pixel values."""
        return {"pixel_values": inputs["pixel_values"]}


def check_processor(inputs: ImageInputs, shape: tuple[int, int, int], place: str) -> None:
    """Raise `RecipeError` if the image processor's output does not have the shape that the model reads."""
    channels, height, width = shape
    blank = require_pillow().Image.new(MODES[channels], (2 * width, height))
    try:
        actual = inputs.pixels(blank).shape
    except Exception as error:
        raise RecipeError(f"the image processor {place} fails: {one_line(error)}") from None
    check_shape(actual, shape, place, RecipeError)


def check_count(number: int, whose: str, classes: tuple[str, ...]) -> None:
    """Raise `RecipeError` if the model's number of classes differs from the data's."""
    if number != len(classes):
        raise RecipeError(
            f"{whose} has num_labels={number}, but the data have {len(classes)} classes: use a model or data with the "
            "same classes, or objective.new_classifier=true with model.path"
        )


def keep_numbers(inputs: ImageInputs, names: list[str]) -> None:
    """Renumber the data's classes like the model if they are named by the model's class names or class indices."""
    for known in (names, [str(number) for number in range(len(names))]):
        if sorted(known) == sorted(inputs.classes):
            return renumber(inputs, known, names)


def class_names(classes: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration fields `id2label` and `label2id`."""
    return {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }
