"""Data of objectives on images: training images in sampling order, and held-out images for evaluation."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset

from crosshead.common.errors import RecipeError
from crosshead.common.progress import Progress

from ..schema.sections import DataOptions, DataSource
from .augmentation import Augmentation
from .image_mixing import MIXING
from .image_sources import ClassFolders, DatasetImages, ImageSource, decoded, digests
from .training_data import Draws, Sample, TrainingData


@dataclass(frozen=True)
class ImageInputs:
    """Image sources, whose images are not read yet, and the image processor."""

    processor: Any
    """transformers image processor; for diffusion models, the noise scheduler, which is saved in its place."""
    channels: int
    sources: tuple[ImageSource, ...]
    evaluation: tuple[ImageSource, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, the same in all sources."""
        return self.sources[0].classes

    def pixels(self, image: Any, **options: Any) -> torch.Tensor:
        """Return the pixel values (channels, height, width) of a Pillow image; `options` are for the processor."""
        return pixel_values(self.processor, image, **options)

    def save_pretrained(self, folder: str) -> None:
        """Save the processor to a folder."""
        self.processor.save_pretrained(folder)


def pixel_values(processor: Any, image: Any, **options: Any) -> torch.Tensor:
    """Return the pixel values (channels, height, width) of a Pillow image."""
    values: torch.Tensor = processor(image, return_tensors="pt", **options)["pixel_values"][0]
    return values.float()


def find_images(options: DataOptions, columns: tuple[str, str], processor: Any, channels: int) -> ImageInputs:
    """Open the sources and check that their classes agree; `columns` name image and label in a Hub dataset."""

    def open_source(source: DataSource) -> ImageSource:
        images: ImageSource = ClassFolders(source) if source.kind == "images" else DatasetImages(source, *columns)
        if inputs:
            check_classes(source.path, images.classes, options.sources[0].path, inputs[0].classes)
        inputs.append(images)
        return images

    inputs: list[ImageSource] = []
    training = tuple(map(open_source, options.sources))
    return ImageInputs(processor, channels, training, tuple(map(open_source, options.evaluation)))


def renumber(inputs: ImageInputs, order: Sequence[str], names: Sequence[str]) -> None:
    """Reorder the classes of all sources in place: class `order[n]` gets index n and the name `names[n]`."""
    for source in (*inputs.sources, *inputs.evaluation):
        numbers = [order.index(name) for name in source.classes]
        source.labels = [numbers[label] for label in source.labels]
        source.classes = tuple(names)


def check_classes(source: str, classes: Sequence[str], first: str, expected: Sequence[str]) -> None:
    """Raise `RecipeError` if two sources have different classes."""
    if len(classes) != len(expected):
        different = sorted(set(classes) ^ set(expected))
        which = f" (only one of them has {different[0]!r})" if different else ""
        raise RecipeError(
            f"{source} has {len(classes)} classes, but {first} has {len(expected)}{which}: use the same classes"
        )
    for name, expected_name in zip(classes, expected, strict=True):
        if name != expected_name:
            raise RecipeError(
                f"{source} has the class {name!r}, but {first} has {expected_name!r} in its place: use the same "
                "classes"
            )


class Images(Dataset[dict[str, Any]]):
    """A subset of a source's images, decoded, with their class indices."""

    def __init__(self, source: ImageSource, indices: list[int], channels: int) -> None:
        self.source, self.indices, self._channels = source, indices, channels

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = self.indices[position]
        label = torch.tensor(self.source.labels[index])
        return {"image": decoded(self.source, index, self._channels), "labels": label}


@dataclass(frozen=True)
class ProcessImage:
    """Turns a decoded image into a sample: with the image processor, in training after random augmentation."""

    inputs: ImageInputs
    augmentation: Augmentation | None
    """None for evaluation samples."""

    def __call__(self, sample: dict[str, Any], draws: Draws) -> Sample:
        """Return pixel values, label and, in training, the random number that seeds mixup and CutMix."""
        if self.augmentation is None:
            return {"pixel_values": self.inputs.pixels(sample["image"]), "labels": sample["labels"]}
        image = self.augmentation.image(sample["image"], draws)
        pixels = self.inputs.pixels(image, do_resize=False, do_center_crop=False)
        pixels = self.augmentation.pixels(pixels, draws)
        return {"pixel_values": pixels, "labels": sample["labels"], MIXING: torch.tensor(int(draws.integers(2**63)))}


def image_processor(size: int, channels: int, smallest_crop: float = 0.0) -> Any:
    """Return the image processor for a model from scratch: a central square, with pixel values from -1 to 1.

    The square's side is 7/8 of the image's shorter side, as usual for a model trained on random crops, or the whole
    shorter side if `smallest_crop` is 1.
    """
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    half = [0.5] * channels
    return BitImageProcessorPil(
        size={"shortest_edge": size if smallest_crop == 1 else int(size / (7 / 8))},
        crop_size={"height": size, "width": size},
        image_mean=half,
        image_std=half,
        do_convert_rgb=channels == 3,
    )


def read_images(options: DataOptions, inputs: ImageInputs, progress: Progress) -> TrainingData:
    """Split the sources into training and held-out images; images that the cache does not know are decoded once."""
    root = Path(options.cache)
    training, evaluation, content = [], [], []
    for source, data_source in zip(inputs.sources, options.sources, strict=True):
        image_digests = digests(source, data_source.path, root, progress)
        held_out = [is_held_out(digest, options.held_out) for digest in image_digests]
        parts = [[index for index, held in enumerate(held_out) if held == kind] for kind in (False, True)]
        if not parts[0]:
            raise RecipeError(f"{data_source.path} has no images left to train on: add some, or hold less out")
        training.append(Images(source, parts[0], inputs.channels))
        evaluation.append(Images(source, parts[1], inputs.channels))
        content.append([data_source.weight, [(image_digests[index], source.labels[index]) for index in parts[0]]])
    for source, data_source in zip(inputs.evaluation, options.evaluation, strict=True):
        digests(source, data_source.path, root, progress)
        evaluation.append(Images(source, list(range(len(source.labels))), inputs.channels))
    evaluation = [images for images in evaluation if len(images)]
    if not evaluation and (options.held_out or options.evaluation):
        raise RecipeError(f"data.held_out={options.held_out} gives no image to evaluate on: hold more out")
    return TrainingData(
        sources=tuple(training),
        weights=tuple(source.weight for source in options.sources),
        evaluation=ConcatDataset(evaluation) if evaluation else None,
        fingerprint=blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
    )


def is_held_out(digest: str, share: float) -> bool:
    """Whether an image is used for evaluation; depends only on its content, so that copies are on the same side."""
    return int(digest[:16], 16) < share * 2**64
