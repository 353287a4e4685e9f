"""Samples of a diffusion training: an image, its class, a diffusion timestep and noise, drawn for each sample."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .training_data import Draws, Sample

NO_CLASS = 0.1
"""Fraction of training samples whose class label is dropped, for classifier-free guidance, as in DiT."""
TIMES, NOISE, LATENT_NOISE = "timesteps", "noise", "latent_noise"
"""Keys of a sample: the timestep, the noise that is added, and the noise that samples the autoencoder's latents."""


@dataclass(frozen=True)
class AddNoise:
    """Turns a decoded image into a diffusion sample: its central square, a class, a timestep and noise.

    All random numbers depend on the sample alone, so that a resumed run or another number of processes gets the same.
    """

    size: int
    """Side length of the square, in pixels."""
    shape: tuple[int, int, int]
    """Channels, height and width of the noise."""
    classes: int
    """Number of classes; also the index of a dropped label."""
    times: int
    """Number of diffusion timesteps."""
    has_latents: bool
    """Whether the model is trained on latents of an autoencoder, which need noise of their own."""
    trains: bool
    """Whether samples are for training, in which labels are dropped at random."""
    flips: bool
    """Whether half of the images are mirrored horizontally."""

    def __call__(self, sample: dict[str, Any], draws: Draws) -> Sample:
        """Return pixel values from -1 to 1 (channels, size, size), the label, the timestep and noise."""
        from PIL import Image, ImageOps

        image = ImageOps.fit(sample["image"], (self.size, self.size), Image.Resampling.BICUBIC)
        if self.flips and draws.random() < 0.5:
            image = ImageOps.mirror(image)
        is_hidden = self.trains and draws.random() < NO_CLASS
        values = np.asarray(image, dtype=np.float32).reshape(self.size, self.size, -1) / 127.5 - 1
        prepared = {
            "pixel_values": torch.from_numpy(values).permute(2, 0, 1).contiguous(),
            "labels": torch.tensor(self.classes) if is_hidden else sample["labels"],
            TIMES: torch.tensor(int(draws.integers(self.times))),
            NOISE: self._noise(draws),
        }
        return prepared | ({LATENT_NOISE: self._noise(draws)} if self.has_latents else {})

    def _noise(self, draws: Draws) -> torch.Tensor:
        return torch.from_numpy(draws.standard_normal(self.shape, dtype=np.float32))
