"""Loss of a denoising diffusion model: error of the predicted noise and, if predicted, loss of the variance.

Noise: the mean squared error (Ho et al., Denoising Diffusion Probabilistic Models, 2020). Variance: if the model has
two outputs per channel, the second interpolates the log variance between its lower and upper bound (Nichol and
Dhariwal, Improved DDPM, 2021, as in DiT). It is trained with the term of the variational bound (VLB) of the sample's
timestep, in bits per dimension, without a gradient for the predicted noise. Timesteps are sampled uniformly from
1,000, so that the paper's factor 0.001 of the whole bound is a factor of 1 for one term.
"""

import math
from typing import Any

import torch
from torch import Tensor

from crosshead.common.errors import RecipeError

HALF_BIN = 1 / 255
"""Half the width of a bin of the 256 pixel values from -1 to 1."""
EDGE = 0.999
"""Pixels beyond +-`EDGE` have the highest or the lowest value, whose bin extends to infinity."""
SMALLEST = 1e-12
"""Lower bound of a probability before its logarithm is taken."""


def noise_schedule(learns_variance: bool = False, is_bounded: bool = False) -> Any:
    """Return DiT's noise scheduler: 1,000 timesteps with a linear beta schedule.

    The arguments matter only for sampling: `learns_variance` if the model predicts variances, `is_bounded` if samples
    are clipped to -1 to 1, which holds for pixels but not for latents.
    """
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
    """Diffusion loss per image for a noise schedule."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        betas = schedule.betas.double()
        alpha_bars = (1 - betas).cumprod(0)
        previous_alpha_bars = torch.cat([alpha_bars.new_ones(1), alpha_bars[:-1]])
        variances = betas * (1 - previous_alpha_bars) / (1 - alpha_bars)
        variances[0] = variances[1]  # the variance of the first step is 0, and its logarithm infinite
        self._log_variances = variances.log()
        self._log_betas = betas.log()
        # The posterior mean is linear in the predicted image, whose error is a multiple of the error of the noise.
        self._mean_factors = (
            betas * previous_alpha_bars.sqrt() / (1 - alpha_bars) * ((1 - alpha_bars) / alpha_bars).sqrt()
        )

    def __call__(self, prediction: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the loss of each image (B), given images (B, channels, height, width) and timesteps (B).

        `prediction` has the same shape or, if the model predicts variances, twice as many channels.
        """
        channels = clean.shape[1]
        predicted, *interpolations = prediction.float().split(channels, dim=1)
        loss = mean_by_image((predicted - noise).square())
        if interpolations:
            loss = loss + self._bound(predicted.detach(), interpolations[0], clean, noise, times)
        return loss

    def _bound(self, predicted: Tensor, interpolation: Tensor, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the term of the variational bound for each image (B), in bits per dimension."""
        true, upper, factor = (
            table.to(clean)[times].view(-1, 1, 1, 1)
            for table in (self._log_variances, self._log_betas, self._mean_factors)
        )
        fraction = (interpolation + 1) / 2
        log_variance = fraction * upper + (1 - fraction) * true
        error = factor * (noise - predicted)
        divergence = gaussian_divergence(error, true, log_variance)
        likelihood = pixel_log_likelihood(clean, clean + error, log_variance / 2)
        first = (times == 0).view(-1, 1, 1, 1)
        return mean_by_image(torch.where(first, -likelihood, divergence)) / math.log(2)


def mean_by_image(values: Tensor) -> Tensor:
    """Return the mean over all dimensions but the first."""
    return values.flatten(1).mean(1)


def gaussian_divergence(difference: Tensor, log_variance: Tensor, other_log_variance: Tensor) -> Tensor:
    """Return KL(first || other) of two normal distributions, in nats; `difference` is the difference of the means."""
    ratio = log_variance - other_log_variance
    return (ratio.exp() - ratio - 1 + difference.square() * (-other_log_variance).exp()) / 2


def pixel_log_likelihood(pixels: Tensor, means: Tensor, log_deviation: Tensor) -> Tensor:
    """Return the log-probabilities of the bins of pixel values (from -1 to 1) under normal distributions."""
    scale, distance = (-log_deviation).exp(), pixels - means
    below, above = (torch.special.ndtr(scale * (distance + side)) for side in (-HALF_BIN, HALF_BIN))
    probability = torch.where(pixels < -EDGE, above, torch.where(pixels > EDGE, 1 - below, above - below))
    return probability.clamp_min(SMALLEST).log()
