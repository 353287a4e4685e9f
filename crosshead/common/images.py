"""Reads images with Pillow and the model's own image processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17's public one needs torchvision

from .errors import ConversionError, one_line
from .model_location import pretrained_arguments

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Suffixes of image files, in lower case."""
MODES = {1: "L", 3: "RGB"}
"""Number of channels of the model -> mode of Pillow."""
HIGHEST = 255
"""Highest pixel value in these modes."""
ANY_SIZE = ("dinov2", "transnext")
"""Architectures that read images of any size, because they interpolate their positions; `image_size` is only that of
the pretraining, and the image processor usually gives another one."""

MAX_PIXELS = 2**27
"""Maximum number of pixels of an image file: 400 MB when decoded."""
MAX_SIDE = 65_536
"""Maximum height and width of an image whose cost is computed."""


def image_shape(config: Any, size: int | None = None) -> tuple[int, int, int]:
    """Channels, height and width of the images that the config of a vision transformer names, or of another size."""
    if size in (None, config.image_size):
        size = config.image_size
    elif not reads_any_size(config):
        raise ValueError(f"image_size={size} is not allowed: the model reads images of one size, {config.image_size}")
    elif not (least := getattr(config, "patch_size", 1)) <= size <= MAX_SIDE:
        raise ValueError(f"image_size={size} is not allowed: use {least} to {MAX_SIDE:,} pixels")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return config.num_channels, height, width


def reads_any_size(config: Any) -> bool:
    """Whether the model's images may have another size than its config names."""
    return config.model_type.removeprefix("crosshead_") in ANY_SIZE


def is_image(path: Path, folder: Path) -> bool:
    """Whether `path` in `folder` is an image file that is not hidden, as `._photo.png` of macOS is."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in IMAGE_SUFFIXES and not hidden and path.is_file()


def open_processor(model: str | Path, place: str, error_type: type[ValueError] = ConversionError) -> Any:
    """The image processor of a model, given as a directory or a Hub id; `place` is, for example, "in NAME"."""
    local = Path(model).is_dir()
    try:
        return AutoImageProcessor.from_pretrained(
            **pretrained_arguments(str(model)), local_files_only=local, trust_remote_code=False
        )
    except Exception as error:  # damaged files, and libraries that a processor needs
        raise error_type(f"the image processor {place} cannot be loaded: {one_line(error)}") from None


def upright(image: Any, channels: int) -> Any:
    """Rotate a Pillow image by its EXIF data and convert it to 1 or 3 channels.

    `ValueError` for more than 8 bits, or too many pixels.
    """
    from PIL import ImageOps

    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"it has {image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS:,}: make it smaller"
        )
    if image.mode == "F" or (image.mode.startswith("I") and image.convert("I").getextrema()[1] > HIGHEST):
        raise ValueError(f"its pixels (mode {image.mode}) need more than 8 bits, and would be cut off at {HIGHEST}")
    ImageOps.exif_transpose(image, in_place=True)
    return image.convert(MODES[channels])


def processed_image(file: Path, processor: Any, channels: int) -> torch.Tensor:
    """The pixel values of an image file, (1, channels, height, width), from the image processor."""
    try:
        from PIL import Image
    except ImportError:
        raise ConversionError("images are read with Pillow, which is not installed: pip install pillow") from None
    try:
        with Image.open(file) as image:
            pixels = processor(upright(image, channels), return_tensors="pt")
    except Exception as error:  # Pillow and processors raise many types of errors
        raise ConversionError(f"the image {file} cannot be read: {one_line(error)}") from None
    values: torch.Tensor = pixels["pixel_values"]
    return values


def model_image(file: Path, processor: Any, config: Any, place: str) -> torch.Tensor:
    """The float32 pixel values of an image file, (1, channels, height, width), in a shape that the model reads."""
    pixels = processed_image(file, processor, config.num_channels).float()
    check_shape(pixels.shape[1:], config, place, ConversionError)
    return pixels


def check_shape(actual: Sequence[int], config: Any, place: str, error_type: type[ValueError]) -> None:
    """Raise `error_type` unless the model reads pixel values of the shape that its image processor gives."""
    shape, gives = image_shape(config), tuple(actual)
    if reads_any_size(config):
        if gives[0] != shape[0]:
            raise error_type(
                f"the image processor {place} gives {gives[0]} channels, but the model reads {shape[0]}: use the "
                "model's own preprocessor_config.json"
            )
    elif gives != shape:
        raise error_type(
            f"the image processor {place} gives pixel values of shape {list(gives)}, but the model reads "
            f"{list(shape)}: use the model's own preprocessor_config.json"
        )
