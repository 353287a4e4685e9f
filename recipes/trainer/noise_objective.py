"""Objective of diffusion models: a DiT predicts the noise in images or in their latents."""

from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn

from crosshead.common.errors import RecipeError
from crosshead.common.images import MODES
from crosshead.common.progress import Progress

from ..data.images import ImageInputs, find_images, read_images
from ..data.noise import LATENT_NOISE, NOISE, TIMES, AddNoise
from ..data.training_data import TrainingData
from ..schema.dit_config import DiTFields, dit_config
from .dit_model import initialise, share_embeddings
from .load_balance import HeadRouting
from .loading import load_pretrained
from .noise_loss import NoiseLoss, noise_schedule
from .objective import LABELS, LOSS, Objective, Predictions, Scores


class Noise(Objective):
    """Class-conditional denoising diffusion, as in DiT."""

    def load_processor(self) -> ImageInputs:
        """Open the image sources; their processor is the noise scheduler, which is saved with the trained model."""
        channels = self._config.in_channels if self._vae is None else self._vae.config.in_channels
        if channels not in MODES:
            raise RecipeError(
                f"model.config.in_channels={channels}: images have 1 or 3 channels: use that, or give model.vae to "
                "train on latents"
            )
        learns_variance = self._config.out_channels == 2 * self._config.in_channels
        schedule = noise_schedule(learns_variance, is_bounded=self._vae is None)
        columns = self.options.image_column, self.options.label_column
        return find_images(self.recipe.data, columns, schedule, channels)

    def complete_config(self, config: Any, processor: ImageInputs) -> None:
        """Raise `RecipeError` unless the configuration has the data's number of classes."""
        count = len(processor.classes)
        if count != config.num_embeds_ada_norm:
            raise RecipeError(
                f"model.config.num_embeds_ada_norm={config.num_embeds_ada_norm}, but the images have {count} classes: "
                f"set it to {count}"
            )

    def new_model(self, config: DiTFields) -> nn.Module:
        """Return a DiT with the paper's initialisation."""
        from crosshead.modeling.dit import CrossheadDiTTransformer2DModel

        model: nn.Module = CrossheadDiTTransformer2DModel(**asdict(config))
        initialise(model)
        share_embeddings(model)
        return model

    def open_data(self, processor: ImageInputs, config: Any, progress: Progress) -> TrainingData:
        """Open images with noise and timesteps, which are the same in each evaluation."""
        size, channels = config.sample_size, config.in_channels
        factor = 1 if self._vae is None else 2 ** (len(self._vae.config.block_out_channels) - 1)
        add_noise = partial(
            AddNoise,
            size=size * factor,
            shape=(channels, size, size),
            classes=config.num_embeds_ada_norm,
            times=len(processor.processor.betas),
            has_latents=self._vae is not None,
        )
        training, evaluation = add_noise(trains=True, flips=self.options.flip), add_noise(trains=False, flips=False)
        return read_images(self.recipe.data, processor, progress).prepared(training, evaluation)

    def example(self, config: DiTFields, rows: int) -> dict[str, Any]:
        """Return noisy images, timesteps and class labels, all zero."""
        numbers = torch.zeros(rows, dtype=torch.long)
        images = torch.zeros(rows, config.in_channels, config.sample_size, config.sample_size)
        return {"hidden_states": images, "timestep": numbers, "class_labels": numbers}

    def logits(self, config: DiTFields) -> int:
        """Return 0: a diffusion model has no logits."""
        return 0

    def predictions(self, outputs: Any, inputs: dict[str, Any]) -> list[Predictions]:
        """Return an empty list: a diffusion model predicts no classes."""
        return []

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], items: Any, routing: HeadRouting | None
    ) -> tuple[torch.Tensor, Any]:
        """Return the micro batch's part of the step's loss, and the outputs; `items` is the step's image count."""
        options = {} if routing is None else {"output_head_router_scores": True}
        losses, outputs = self._denoise(model, inputs, **options)
        loss = losses.sum() / items
        if routing is not None:
            loss = loss + routing.loss_by_sequence(outputs, torch.ones_like(losses) / items)
        return loss, outputs

    @torch.no_grad()
    def evaluate(self, model: nn.Module, inputs: dict[str, Any]) -> Scores:
        """Return the loss of each image at its own timestep."""
        losses, _ = self._denoise(model, inputs)
        return {LOSS: torch.stack([losses, torch.ones_like(losses)], dim=1)}

    def _denoise(self, model: nn.Module, inputs: dict[str, Any], **options: bool) -> tuple[torch.Tensor, Any]:
        """Return the loss of each image (B), and the model's outputs."""
        clean, noise, times = self._clean(inputs), inputs[NOISE], inputs[TIMES]
        outputs = model(self._loss.schedule.add_noise(clean, noise, times), times, inputs[LABELS], **options)
        return self._loss(outputs["sample"], clean, noise, times), outputs

    @torch.no_grad()
    def _clean(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the pixels, or scaled latents sampled from the autoencoder (B, channels, height, width)."""
        pixels: torch.Tensor = inputs["pixel_values"]
        if self._vae is None:
            return pixels
        with torch.autocast(pixels.device.type, enabled=False):
            distribution = self._vae.to(pixels.device).encode(pixels).latent_dist
        return (distribution.mean + distribution.std * inputs[LATENT_NOISE]) * self._vae.config.scaling_factor

    @cached_property
    def _config(self) -> DiTFields:
        return dit_config(self.recipe.model.config or {})

    @cached_property
    def _loss(self) -> NoiseLoss:
        return NoiseLoss(noise_schedule())

    @cached_property
    def _vae(self) -> Any:
        name = self.recipe.model.vae
        return None if name is None else load_vae(name, self._config.in_channels)


@lru_cache(maxsize=1)
def load_vae(name: str, channels: int) -> Any:
    """Load a frozen autoencoder; raise `RecipeError` unless its latents have `channels` channels."""
    from diffusers import AutoencoderKL

    vae = load_pretrained(AutoencoderKL, "model.vae", name, use_safetensors=True, torch_dtype=torch.float32)
    if vae.config.latent_channels != channels:
        raise RecipeError(
            f"model.vae={name} has {vae.config.latent_channels} latent channels, but model.config.in_channels="
            f"{channels}: use the same number"
        )
    return vae.eval().requires_grad_(False)
