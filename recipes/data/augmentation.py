"""Image augmentation for training: random crops, flips, RandAugment and random erasing.

Each function draws from the generator of its sample, never from a global state: a resumed run gets the same images.
"""

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
import torch

from ..schema.objectives import Classes
from .training_data import Draws

TRIES = 10
"""Maximum number of boxes drawn per image before the crop falls back to the centre, or nothing is erased."""
CROP_RATIOS = (3 / 4, 4 / 3)
"""Range of the aspect ratio (width / height) of crops (Szegedy et al., Going Deeper with Convolutions, 2015)."""
ERASED_AREAS, ERASED_RATIOS = (0.02, 1 / 3), (0.3, 1 / 0.3)
"""Ranges of the erased box's area, as a fraction of the image, and aspect ratio (Zhong et al., Random Erasing Data
Augmentation, 2020)."""
HIGHEST_MAGNITUDE = 10.0
ROTATION, SHEAR, TRANSLATION, ENHANCEMENT = 30.0, 0.3, 0.45, 0.9
"""RandAugment at the highest magnitude: degrees, shear factor, fraction of the width or height, change of the
enhancement factor 1."""
BITS = 4
"""Bits per channel that `posterize` removes at the highest magnitude."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""


def random_box(width: int, height: int, area: float, ratio: float, draws: Draws) -> Box | None:
    """Return a box of this area (pixels) and aspect ratio at a random position; None if it exceeds the image."""
    wide, high = round(sqrt(area * ratio)), round(sqrt(area / ratio))
    if not (0 < wide <= width and 0 < high <= height):
        return None
    left, top = int(draws.integers(width - wide + 1)), int(draws.integers(height - high + 1))
    return left, top, left + wide, top + high


def crop_box(width: int, height: int, smallest: float, draws: Draws) -> Box:
    """Return a random crop box with at least the fraction `smallest` of the area.

    If none fits in `TRIES` draws, return the largest central box whose aspect ratio is allowed.
    """
    low, high = CROP_RATIOS
    for _ in range(TRIES):
        area, ratio = draws.uniform(smallest, 1.0) * width * height, exp(draws.uniform(log(low), log(high)))
        box = random_box(width, height, area, ratio, draws)
        if box is not None:
            return box
    wide, tall = min(width, round(height * high)), min(height, round(width / low))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of each training image."""

    size: tuple[int, int]
    """Height and width of the augmented image."""
    options: Classes

    def image(self, image: Any, draws: Draws) -> Any:
        """Return a random crop of a Pillow image, possibly mirrored, with RandAugment operations applied."""
        from PIL import Image

        width, height = image.size
        box = crop_box(width, height, self.options.crop, draws)
        image = image.resize(self.size[::-1], Image.Resampling.BICUBIC, box=box)
        if self.options.flip and draws.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for _ in range(self.options.operations):
            operation = OPERATIONS[draws.integers(len(OPERATIONS))]
            image = changed(image, operation, self.options.magnitude / HIGHEST_MAGNITUDE, draws)
        return image

    def pixels(self, pixels: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Apply random erasing to normalised pixel values (channels, height, width): a box becomes normal noise."""
        if draws.random() >= self.options.erasing:
            return pixels
        height, width = self.size
        low, high = map(log, ERASED_RATIOS)
        for _ in range(TRIES):
            area = draws.uniform(*ERASED_AREAS) * width * height
            box = random_box(width, height, area, exp(draws.uniform(low, high)), draws)
            if box is not None:
                left, top, right, bottom = box
                noise = draws.standard_normal((len(pixels), bottom - top, right - left), np.float32)
                pixels = pixels.clone()
                pixels[:, top:bottom, left:right] = torch.from_numpy(noise)
                return pixels
        return pixels


OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize", "contrast"),
    *("brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""Operations of RandAugment (Cubuk et al., 2020)."""


def changed(image: Any, operation: str, strength: float, draws: Draws) -> Any:
    """Apply one RandAugment operation with a strength from 0 to 1, in a random direction."""
    from PIL import Image, ImageEnhance, ImageOps

    signed = strength * int(draws.choice((-1, 1)))
    matrices = {
        "shear_x": (1, signed * SHEAR, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, signed * SHEAR, 1, 0),
        "translate_x": (1, 0, signed * TRANSLATION * image.width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, signed * TRANSLATION * image.height),
    }
    if operation in matrices:
        return image.transform(image.size, Image.Transform.AFFINE, matrices[operation], Image.Resampling.BICUBIC)
    if operation in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ImageEnhance, operation.capitalize())(image).enhance(1 + signed * ENHANCEMENT)
    if operation == "rotate":
        return image.rotate(signed * ROTATION, Image.Resampling.BICUBIC)
    if operation == "solarize":
        return ImageOps.solarize(image, round(256 * (1 - strength)))
    if operation == "posterize":
        return ImageOps.posterize(image, 8 - round(BITS * strength))
    return image if operation == "identity" else getattr(ImageOps, operation)(image)
