"""Objective of image classification, with soft targets for mixed images."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import RecipeError, one_line
from crosshead.common.images import MODES, check_shape, image_shape, open_processor, reads_any_size
from crosshead.common.progress import Progress

from ..data.augmentation import Augmentation
from ..data.image_mixing import OTHER_LABELS, SHARES, MixImages
from ..data.image_sources import require_pillow
from ..data.images import ImageInputs, ProcessImage, find_images, image_processor, pixel_values, read_images, renumber
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
        """Channels, height and width of the model's input images; those of its processor if it reads any size."""
        config = initial_config(self.recipe)
        is_free = self.recipe.model.path is not None and reads_any_size(config)
        return self.processed_shape(config) if is_free else image_shape(config)

    def example_shape(self, config: Any) -> tuple[int, int, int]:
        """The shape, for an estimate from `config`: the model of the recipe may not be here yet."""
        path = self.recipe.model.path
        return self.shape if path and Path(path).is_dir() and reads_any_size(config) else image_shape(config)

    @cached_property
    def processor(self) -> Any:
        """The model's image processor; for a model from scratch, a new one."""
        if path := self.recipe.model.path:
            return open_processor(path, f"of model.path={path}", RecipeError)
        channels, height, _ = self.shape
        return image_processor(height, channels, self.options.crop)

    def processed_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the shape of the images from the image processor; `RecipeError` unless the model reads it."""
        return processed_shape(self.processor, config, f"of model.path={self.recipe.model.path}")

    def load_processor(self) -> ImageInputs:
        """Load the image processor, and open the image sources with their classes."""
        require_pillow()
        channels, height, width = self.shape
        mode_of(channels)
        if self.recipe.model.path:
            self.processed_shape(initial_config(self.recipe))
        elif height != width:
            raise RecipeError(f"model.config has image_size=[{height}, {width}]: use one number, for square images")
        columns = self.options.image_column, self.options.label_column
        return find_images(self.recipe.data, columns, self.processor, channels)

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
        return {"pixel_values": torch.zeros(rows, *self.example_shape(config))}

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


def mode_of(channels: int) -> str:
    """Return the mode of Pillow for images with this number of channels; `RecipeError` if there is none."""
    if channels not in MODES:
        raise RecipeError(f"the model reads images with {channels} channels, and only 1 or 3 are supported")
    return MODES[channels]


def processed_shape(processor: Any, config: Any, place: str) -> tuple[int, int, int]:
    """Return channels, height and width that the image processor gives for a wide and a tall image.

    Raise `RecipeError` unless the two are equal and the model reads them.
    """
    channels, height, width = image_shape(config)
    mode, sizes = mode_of(channels), []
    for size in ((2 * width, height), (width, 2 * height)):
        blank = require_pillow().Image.new(mode, size)
        try:
            shape = pixel_values(processor, blank).shape
        except Exception as error:
            raise RecipeError(f"the image processor {place} fails: {one_line(error)}") from None
        check_shape(shape, config, place, RecipeError)
        sizes.append((shape[1], shape[2]))
    if sizes[0] != sizes[1]:
        raise RecipeError(
            f"the image processor {place} gives images of different sizes, such as {sizes[0][0]} x {sizes[0][1]}: "
            "set do_center_crop and crop_size in its preprocessor_config.json"
        )
    return channels, *sizes[0]


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
