"""Toy images for `crosshead train RECIPE --toy FOLDER`: stripes, whose direction is the class."""

from math import cos, pi, sin
from pathlib import Path
from random import Random

import numpy as np

from .image_sources import require_pillow

CLASSES, IMAGES, SIZE = 4, 12, 32
"""Number of classes, number of images per class, and side length in pixels."""
PERIOD, NOISE = 8.0, 0.2
"""Stripe period in pixels, and standard deviation of the noise for stripes with values from -1 to 1."""


def write_toy_images(folder: Path) -> str:
    """Write the images as PNG files, in one folder per class; return the path."""
    pillow = require_pillow()
    rows, columns = np.indices((SIZE, SIZE))
    for number in range(CLASSES):
        angle = pi * number / CLASSES
        class_folder = folder / f"{round(180 * number / CLASSES)}_degrees"
        class_folder.mkdir(parents=True, exist_ok=True)
        for index in range(IMAGES):
            draws = Random(f"{number} {index}")
            phase = draws.uniform(0, 2 * pi)
            waves = np.sin(2 * pi / PERIOD * (columns * cos(angle) + rows * sin(angle)) + phase)
            noise = np.array([draws.gauss(0, NOISE) for _ in range(waves.size)]).reshape(waves.shape)
            pixels = np.clip(127.5 * (1 + 0.7 * (waves + noise)), 0, 255).astype(np.uint8)
            pillow.Image.fromarray(pixels).save(class_folder / f"{index}.png")
    return str(folder)
