"""The loss of a denoising diffusion model: predicted noise and, if the model predicts it, the variance of each step.

Ho et al., Denoising Diffusion Probabilistic Models (2020): the mean squared error of the noise. Nichol and Dhariwal,
Improved DDPM (2021), as in DiT: if the model has two outputs for each channel, the second is the place of a log
variance between its lower and its upper bound. It learns from the variational bound of its step, in bits for each
number; the bound has no gradient for the predicted noise. All terms of the bound are equally likely, so that with
1,000 steps the factor 0.001 of the sum makes the factor 1 of a term.
"""

import math
from typing import Any

import torch
from torch import Tensor

from crosshead.common.errors import RecipeError

HALF_BIN = 1 / 255
"""Of the values of a pixel, which are 256 from -1 to 1."""
EDGE = 0.999
"""Pixels beyond it are the lowest or the highest, whose bins have no end."""
SMALLEST = 1e-12
"""Of a probability before its logarithm."""


def noise_schedule(learns_variance: bool = False, is_bounded: bool = False) -> Any:
    """DiT's: 1,000 steps with a linear schedule; the other settings are for sampling, pixels are from -1 to 1."""
    try:
        from diffusers import DDPMScheduler
    except ImportError:
        raise RecipeError("the objective noise needs diffusers: pip install 'crosshead[diffusion]'") from None
    return DDPMScheduler(
        num_train_timesteps=1000,
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        variance_type="learned_range" if learns_variance else "fixed_small",
        clip_sample=is_bounded,
    )


class NoiseLoss:
    """The loss of each image."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        betas = schedule.betas.double()
        kept = (1 - betas).cumprod(0)
        kept_before = torch.cat([kept.new_ones(1), kept[:-1]])
        variances = betas * (1 - kept_before) / (1 - kept)
        variances[0] = variances[1]  # that of the first step is zero
        self._log_variances = variances.log()
        self._log_betas = betas.log()
        # The mean of a step is linear in the predicted image, which is off by a multiple of the noise's error.
        self._mean_factors = betas * kept_before.sqrt() / (1 - kept) * ((1 - kept) / kept).sqrt()

    def noisy(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The inputs of the model."""
        return self._schedule.add_noise(clean, noise, times)

    def __call__(self, prediction: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """A loss for each image (B) of images (B, channels, height, width)."""
        channels = clean.shape[1]
        predicted, *places = prediction.float().split(channels, dim=1)
        loss = mean_by_image((predicted - noise).square())
        if places:
            loss = loss + self._bound(predicted.detach(), places[0], clean, noise, times)
        return loss

    def _bound(self, predicted: Tensor, places: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The term of the variational bound (B), in bits for each number."""
        true, upper, factor = (
            table.to(clean)[times].view(-1, 1, 1, 1)
            for table in (self._log_variances, self._log_betas, self._mean_factors)
        )
        share = (places + 1) / 2
        log_variance = share * upper + (1 - share) * true
        error = factor * (noise - predicted)
        divergence = gaussian_divergence(error, true, log_variance)
        likelihood = pixel_log_likelihood(clean, clean + error, log_variance / 2)
        first = (times == 0).view(-1, 1, 1, 1)
        return mean_by_image(torch.where(first, -likelihood, divergence)) / math.log(2)


def mean_by_image(values: Tensor) -> Tensor:
    """The mean over all but the first dimension."""
    return values.flatten(1).mean(1)


def gaussian_divergence(difference: Tensor, log_variance: Tensor, other_log_variance: Tensor) -> Tensor:
    """The KL divergence of a normal distribution from another one, in nats; `difference` is that of their means."""
    ratio = log_variance - other_log_variance
    return (ratio.exp() - ratio - 1 + difference.square() * (-other_log_variance).exp()) / 2


def pixel_log_likelihood(pixels: Tensor, means: Tensor, log_deviation: Tensor) -> Tensor:
    """The log-probability of the bins of pixel values from -1 to 1, under normal distributions."""
    scale, distance = (-log_deviation).exp(), pixels - means
    below, above = (torch.special.ndtr(scale * (distance + side)) for side in (-HALF_BIN, HALF_BIN))
    probability = torch.where(pixels < -EDGE, above, torch.where(pixels > EDGE, 1 - below, above - below))
    return probability.clamp_min(SMALLEST).log()
