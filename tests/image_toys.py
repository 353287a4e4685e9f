"""Toy vision transformer checkpoints and image folders."""

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import toys

IMAGE_BACKBONES = ("ViT", "DeiT", "Dinov2")
CLASSIFIER = "ForImageClassification"
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def write_image_model(folder: Path, backbone: str = "ViT", task: str = CLASSIFIER, **changes: Any) -> Path:
    """Save a stock vision transformer with its image processor; return its folder."""
    config = getattr(transformers, f"{backbone}Config")(**(toys.IMAGE_SIZES | changes))
    toys.lopsided(getattr(transformers, f"{backbone}{task}")(config)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": config.image_size, "width": config.image_size}).save_pretrained(folder)
    return folder


def write_images(folder: Path, count: int = 24) -> Path:
    """Save random images of 20 x 12 pixels, half of them in a subfolder; return the folder."""
    (folder / "more").mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        pixels = torch.randint(256, (12, 20, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save((folder / "more" if index % 2 else folder) / f"{index}.png")
    return folder
