"""Images for calibration and verification: the images in a folder, or random pixel values."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.images import IMAGE_SUFFIXES, image_shape, is_image, model_image, open_processor
from crosshead.common.progress import Progress

from ..architectures.families import FAMILIES
from ..sources.model_folder import file_digest
from ..sources.resolve import Source
from .streamed_model import StreamedModel
from .text import SEED, Text

IMAGES = 256
"""Maximum number of images for calibration."""
RANDOM_NAME = f"random pixel values of a normal distribution, seed {SEED}"
"""Name of random images in conversion.json."""


def random_pixels(config: Any, count: int) -> torch.Tensor:
    """Return pixel values (count, channels, height, width) with the mean and variance of normalised images."""
    return torch.randn(count, *image_shape(config), generator=torch.Generator().manual_seed(SEED))


def image_files(folder: Path, count: int) -> list[Path]:
    """Return at most `count` evenly spaced image files of a folder and its subfolders."""
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder: this model reads images, give a folder of them")
    files = sorted(file for file in folder.rglob("*") if is_image(file, folder))
    if not files:
        raise ConversionError(f"{folder} has no images: give a folder with {', '.join(IMAGE_SUFFIXES)} files")
    count = min(count, len(files))
    return [files[index * len(files) // count] for index in range(count)]


def read_pixels(source: Source, config: Any, folder: Path, count: int) -> torch.Tensor:
    """Return pixel values of at most `count` evenly spaced images of a folder, from the source's image processor."""
    source_folder = source.files[0].parent
    place = f"in {source_folder.name}"
    processor = open_processor(source_folder, place)
    pixels = [model_image(file, processor, config, place) for file in image_files(folder, count)]
    if len(sizes := {tuple(image.shape[2:]) for image in pixels}) > 1:
        smallest, largest = (" x ".join(map(str, size)) for size in (min(sizes), max(sizes)))
        raise ConversionError(
            f"the image processor {place} gives images of different sizes, from {smallest} to {largest}: give images "
            "of one size, or set do_center_crop and crop_size in preprocessor_config.json"
        )
    return torch.cat(pixels)


@dataclass(frozen=True)
class Images(Text):
    """The input of calibration for a vision model: a folder of images, or a saved calibration."""

    def described(self) -> dict[str, str | bool]:
        """Return name and digest of the images, for conversion.json."""
        if self.path is None:
            raise ConversionError(
                "this conversion fits routers to images: give a folder of them with --calibration, or use "
                "mixture:method=paper"
            )
        if self.is_saved:
            return super().described()
        digests = "".join(file_digest(file) for file in image_files(self.path, IMAGES))
        return {"images": self.path.resolve().name, "sha256": sha256(digests.encode()).hexdigest()}

    def calibration_batch(self, source: Source, model: StreamedModel, progress: Progress) -> torch.Tensor:
        """Return the pixel values (B, channels, height, width) of the images to calibrate on."""
        if self.path is None:
            raise ValueError("no folder of images was given")
        return read_pixels(source, model.config, self.path, IMAGES)


def calibration_input(path: Path | None, source: Source) -> Text:
    """Return the input of a calibration: text, or images for a vision model."""
    return Images(path) if FAMILIES[source.config["model_type"]].reads_images else Text.of(path, source)
