"""The model of a diffusion recipe at toy size: a small DiT and, if the recipe has one, a small autoencoder."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..data.toy_images import CLASSES
from .dit_config import dit_config
from .recipe import Recipe
from .sections import ModelOptions

BLOCKS, HEAD_SIZE, SAMPLE_SIZE, WIDTH = 4, 4, 8, 8
"""Blocks of the DiT, features of a head, pixels or latents along a side, and channels in the autoencoder."""
ShrinkOptions = Callable[[str, Mapping[str, Any], list[int]], dict[str, Any]]
"""A mechanism's options for some of its layers."""


def toy_diffusion(recipe: Recipe, folder: Path, shrink: ShrinkOptions) -> ModelOptions:
    """The section `model`; writes the autoencoder into the folder."""
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
    return replace(recipe.model, config=config, vae=vae)


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
