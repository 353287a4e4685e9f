"""Images for calibration and verification: the images in a folder, or random pixel values."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.images import IMAGE_SUFFIXES, image_of_shape, open_processor
from crosshead.common.progress import Progress
from crosshead.modeling.encoder import image_shape

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


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders; `ConversionError` if there are none."""
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder: this model reads images, give a folder of them")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if not files:
        raise ConversionError(f"{folder} has no images: give a folder with {', '.join(IMAGE_SUFFIXES)} files")
    return files


def read_pixels(source: Source, config: Any, folder: Path, count: int) -> torch.Tensor:
    """Return pixel values of at most `count` evenly spaced images of a folder, from the source's image processor."""
    files = image_files(folder)
    count = min(count, len(files))
    selected = [files[index * len(files) // count] for index in range(count)]
    shape, source_folder = image_shape(config), source.files[0].parent
    place = f"in {source_folder.name}"
    processor = open_processor(source_folder, place)
    return torch.cat([image_of_shape(file, processor, shape, place) for file in selected])


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
        digests = "".join(file_digest(file) for file in image_files(self.path))
        return {"images": self.path.resolve().name, "sha256": sha256(digests.encode()).hexdigest()}

    def calibration_batch(self, source: Source, model: StreamedModel, progress: Progress) -> torch.Tensor:
        """Return the pixel values (B, channels, height, width) of the images to calibrate on."""
        if self.path is None:
            raise ValueError("no folder of images was given")
        return read_pixels(source, model.config, self.path, IMAGES)


def calibration_input(path: Path | None, source: Source) -> Text:
    """Return the input of a calibration: text, or images for a vision model."""
    return Images(path) if FAMILIES[source.config["model_type"]].reads_images else Text.of(path, source)
