"""A diffusion recipe at toy size: images of stripes, a small DiT and, if the recipe has one, a small autoencoder."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..data.toy_images import CLASSES, write_toy_images
from .dit_config import dit_config
from .recipe import Recipe
from .sections import DataOptions, DataSource, ModelOptions

BLOCKS, HEAD_SIZE, SAMPLE_SIZE, WIDTH = 4, 8, 8, 8
"""Blocks of the DiT, features of a head, pixels or latents along a side, and channels in the autoencoder."""
HELD_OUT = 0.2
ShrinkOptions = Callable[[str, Mapping[str, Any], list[int]], dict[str, Any]]
"""A mechanism's options for some of its layers."""


def toy_diffusion(recipe: Recipe, folder: Path, shrink: ShrinkOptions) -> tuple[ModelOptions, DataOptions]:
    """The sections `model` and `data`; writes the images and the autoencoder into the folder."""
    content = recipe.model.config or {}
    large = dit_config(content)
    count = min(BLOCKS, large.num_layers)
    blocks = [index * large.num_layers // count for index in range(count)]
    config = content | {
        "num_layers": count,
        "attention_head_dim": HEAD_SIZE,
        "sample_size": SAMPLE_SIZE,
        "patch_size": min(2, large.patch_size),
        "num_embeds_ada_norm": CLASSES,
        "mixers": {name: shrink(name, options, blocks) for name, options in large.mixers.items()},
    }
    vae = None if recipe.model.vae is None else write_vae(folder / "vae", large.in_channels, recipe.train.seed)
    images, data = write_toy_images(folder / "images"), recipe.data
    small = replace(
        data,
        sources=tuple(DataSource(images, "images", weight=source.weight) for source in data.sources),
        held_out=HELD_OUT if data.held_out or data.evaluation else 0.0,
        evaluation=(),
        cache=str(folder / "cache"),
    )
    return replace(recipe.model, config=config, vae=vae), small


def write_vae(folder: Path, channels: int, seed: int) -> str:
    """Write an autoencoder with random weights, whose latents have half the size of the image."""
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(WIDTH,) * 2,
            norm_num_groups=WIDTH // 2,
            latent_channels=channels,
        ).save_pretrained(str(folder))
    return str(folder)
