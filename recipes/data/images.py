"""The training and evaluation data of an image classifier: augmented images in sampling order, and held-out ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset

from crosshead.common.errors import RecipeError
from crosshead.common.progress import Progress, silent

from ..schema.sections import DataOptions, DataSource
from .augmentation import Augmentation
from .image_mixing import INDEX
from .image_sources import ClassFolders, DatasetImages, ImageSource, decoded, digests
from .readers import expand_home
from .sampling_order import SampleOrder
from .training_data import Sample

FOLDERS, HUB = "images", "hub"
"""The kinds of sources with images."""


@dataclass(frozen=True)
class Labelled:
    """Some of the images of a source."""

    source: ImageSource
    indices: list[int]
    digests: list[str]
    """Of all images of the source."""

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, place: int, channels: int) -> Any:
        """An image of Pillow."""
        return decoded(self.source, self.indices[place], channels)

    def label(self, place: int) -> int:
        """Its class."""
        return self.source.labels[self.indices[place]]

    def content(self) -> list[Any]:
        """The digests and classes."""
        return [(self.digests[index], self.source.labels[index]) for index in self.indices]


class AugmentedImages(Dataset[Sample]):
    """All samples of a run, over all its epochs: to be read in order, never shuffled."""

    def __init__(self, data: "ImageData", augmentation: Augmentation, seed: int, count: int) -> None:
        self._data, self._augmentation, self._seed, self._count = data, augmentation, seed, count
        self._order = SampleOrder([len(source) for source in data.sources], data.weights, seed)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        number = range(self._count)[index]
        source, place = self._order.sample(number)
        images, draws = self._data.sources[source], Random(f"{self._seed} sample {number}")
        image = self._augmentation.image(images.image(place, self._data.channels), draws)
        pixels = self._data.normalised(image, do_resize=False, do_center_crop=False)
        return {
            "pixel_values": self._augmentation.pixels(pixels, draws),
            "labels": torch.tensor(images.label(place)),
            INDEX: torch.tensor(number),
        }


class PlainImages(Dataset[Sample]):
    """The images of one source as the image processor prepares them."""

    def __init__(self, images: Labelled, data: "ImageData") -> None:
        self._images, self._data = images, data

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        pixels = self._data.normalised(self._images.image(index, self._data.channels))
        return {"pixel_values": pixels, "labels": torch.tensor(self._images.label(index))}


@dataclass(frozen=True)
class ImageData:
    """Sources of images with the same classes."""

    sources: tuple[Labelled, ...]
    held_out: tuple[Labelled, ...]
    weights: tuple[float, ...]
    classes: tuple[str, ...]
    fingerprint: str
    """Equal if the same seed gives the same samples."""
    processor: Any
    channels: int

    @property
    def evaluation(self) -> Dataset[Sample] | None:
        """The images to evaluate on, without augmentation."""
        return ConcatDataset([PlainImages(part, self) for part in self.held_out]) if self.held_out else None

    def samples(self, augmentation: Augmentation, count: int, seed: int) -> AugmentedImages:
        """The samples of a run."""
        return AugmentedImages(self, augmentation, seed, count)

    def normalised(self, image: Any, **options: Any) -> torch.Tensor:
        """Pixel values (channels, height, width)."""
        pixels: torch.Tensor = self.processor(image, return_tensors="pt", **options)["pixel_values"][0]
        return pixels.float()


def image_processor(size: int, channels: int) -> Any:
    """For a model from scratch: a central crop of 7/8 of the shorter side, and pixel values from -1 to 1."""
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

    half = [0.5] * channels
    return ConvNextImageProcessorPil(
        size={"shortest_edge": size}, crop_pct=7 / 8, image_mean=half, image_std=half, do_convert_rgb=channels == 3
    )


def open_images(
    options: DataOptions, columns: tuple[str, str], processor: Any, channels: int, progress: Progress = silent
) -> ImageData:
    """Open the sources; `columns` are those of the image and its class in a dataset of the Hub."""
    root = Path(expand_home(options.cache))

    def opened(source: DataSource) -> Labelled:
        found: ImageSource = ClassFolders(source) if source.kind == FOLDERS else DatasetImages(source, *columns)
        indices = list(range(len(found.labels)))
        return Labelled(found, indices, digests(found, source.path, root, partial(progress, source.path)))

    wholes = [opened(source) for source in options.sources]
    training = [part(whole, options.held_out, is_held_out=False) for whole in wholes]
    for source, images in zip(options.sources, training, strict=True):
        if not len(images):
            raise RecipeError(f"{source.path} has no images left to train on: add some, or hold less out")
    held_out = [part(whole, options.held_out, is_held_out=True) for whole in wholes]
    held_out += [opened(source) for source in options.evaluation]
    classes = wholes[0].source.classes
    for source, images in zip(
        (*options.sources, *options.evaluation), (*wholes, *held_out[len(wholes) :]), strict=True
    ):
        check_classes(source.path, images.source.classes, f"those of {options.sources[0].path}", classes)
    held_out = [images for images in held_out if len(images)]
    if not held_out and (options.held_out or options.evaluation):
        raise RecipeError(f"held_out={options.held_out} gives no image to evaluate on: hold more out")
    content = json.dumps(
        [[source.weight, images.content()] for source, images in zip(options.sources, training, strict=True)]
    )
    return ImageData(
        sources=tuple(training),
        held_out=tuple(held_out),
        weights=tuple(source.weight for source in options.sources),
        classes=classes,
        fingerprint=blake2b(content.encode(), digest_size=16).hexdigest(),
        processor=processor,
        channels=channels,
    )


def part(images: Labelled, share: float, is_held_out: bool) -> Labelled:
    """The images to train on, or those to evaluate on, chosen by their content: copies stay together."""
    chosen = [
        index for index in images.indices if (int(images.digests[index][:16], 16) < share * 2**64) == is_held_out
    ]
    return Labelled(images.source, chosen, images.digests)


def check_classes(place: str, found: Sequence[str], whose: str, expected: Sequence[str]) -> None:
    """`RecipeError` if two lists of classes differ."""
    if list(found) == list(expected):
        return
    if len(found) != len(expected):
        raise RecipeError(f"{place} has {len(found)} classes, but {whose} are {len(expected)}: use the same classes")
    own, other = next((own, other) for own, other in zip(found, expected, strict=True) if own != other)
    raise RecipeError(f"{place} has the class {own!r}, but {whose} have {other!r} in its place: use the same classes")
