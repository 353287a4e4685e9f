"""Samples of a denoising training: an image, its class, a time of the diffusion and noise, drawn for each sample."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .training_data import Draws, Sample

NO_CLASS = 0.1
"""The share of samples whose class is hidden from the model, for classifier-free guidance, as in DiT."""
TIMES, NOISE, LATENT_NOISE = "timesteps", "noise", "latent_noise"
"""In a sample: the time, the noise that is added, and that of a draw from the encoder's distribution."""


@dataclass(frozen=True)
class AddNoise:
    """Makes a sample of an image: a central square of it, a class, a time and noise.

    A hidden class has the number behind the last class. All draws belong to the sample, and not to the step or the
    process, so that a resumed run, and any division of a step, gets the same ones.
    """

    size: int
    """Pixels along a side."""
    shape: tuple[int, int, int]
    """Channels, height and width of the noise."""
    classes: int
    times: int
    has_latents: bool
    trains: bool
    """Whether classes are hidden."""
    flips: bool
    """Whether half of the images are flipped."""

    def __call__(self, sample: dict[str, Any], draws: Draws) -> Sample:
        """Pixel values from -1 to 1 (channels, size, size), and the rest."""
        from PIL import Image, ImageOps

        image = ImageOps.fit(sample["image"], (self.size, self.size), Image.Resampling.BICUBIC)
        if self.flips and draws.random() < 0.5:
            image = ImageOps.mirror(image)
        is_hidden = self.trains and draws.random() < NO_CLASS
        values = np.asarray(image, dtype=np.float32).reshape(self.size, self.size, -1) / 127.5 - 1
        found = {
            "pixel_values": torch.from_numpy(values).permute(2, 0, 1).contiguous(),
            "labels": torch.tensor(self.classes) if is_hidden else sample["labels"],
            TIMES: torch.tensor(int(draws.integers(self.times))),
            NOISE: self._noise(draws),
        }
        return found | ({LATENT_NOISE: self._noise(draws)} if self.has_latents else {})

    def _noise(self, draws: Draws) -> torch.Tensor:
        return torch.from_numpy(draws.standard_normal(self.shape, dtype=np.float32))
