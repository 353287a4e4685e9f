"""The shipped recipe of a diffusion transformer at toy size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from crosshead.modeling.dit import CrossheadDiTTransformer2DModel
from crosshead.recipes.schema.recipe import Recipe, load_recipe
from crosshead.recipes.schema.toy import toy
from crosshead.recipes.trainer.noise_loss import noise_schedule

LATENTS = "small/dit_mixture"
PIXELS = ("model.vae=null", "model.config.in_channels=1", "model.config.out_channels=1")
"""Recipe changes that train on greyscale pixels, without an autoencoder."""


def recipe(folder: Path, *changes: str, steps: int = 4, every: int = 2, **options: Any) -> Recipe:
    """Return the shipped recipe at toy size for `steps` steps, evaluation off."""
    small = toy(load_recipe(LATENTS, changes), folder)
    batch = options.get("batch_samples", small.train.batch_samples)
    options = {"samples": steps * batch, "learning_rate": 1e-2, "average": 0.7} | options
    return replace(
        small,
        train=replace(small.train, **options),
        checkpoints=replace(small.checkpoints, every=every, keep=99),
        watch=replace(small.watch, evaluate_every=None),
    )


def write_diffusion_model(folder: Path) -> None:
    """Save a DiT of random weights with its scheduler, like a finished training run."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 4}
    model = CrossheadDiTTransformer2DModel(
        **sizes, in_channels=3, out_channels=6, num_embeds_ada_norm=3, mixers={"mixture": {"active_heads": 1}}
    )
    model.save_pretrained(folder)
    noise_schedule(learns_variance=True).save_pretrained(folder)
