"""Batches of images, each mixed with the other one of its pair: mixup and CutMix, with soft targets.

Samples 2k and 2k + 1 of a run are a pair, and a number that the first of them has drawn determines how. So a step does
not depend on how it is divided into micro batches of even size, and among processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from .training_data import Draws, Sample

MIXING = "mixing"
"""In a sample of the training: a random number, from which its pair is mixed."""
OTHER_LABELS, SHARES = "other_labels", "shares"
"""In a batch of the training: the classes of the other images, and the shares of the images themselves."""


@dataclass(frozen=True)
class MixImages:
    """Makes a batch of samples; those of a training are mixed in pairs."""

    mixup: float
    """Both shares of a pair are drawn from Beta(mixup, mixup) (Zhang et al., 2018); 0 for none."""
    cutmix: float
    """The same of the area that stays (Yun et al., 2019). With both, each pair has one of the two."""

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """The images (B, channels, height, width) and their classes (B)."""
        batch = {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}
        numbers = batch.pop(MIXING, None)
        if numbers is None:
            return batch
        images = batch["pixel_values"]
        if not (self.mixup or self.cutmix):
            return batch | {OTHER_LABELS: batch["labels"], SHARES: torch.ones(len(images))}
        others = swapped(images)
        shares = torch.ones(len(images))
        for first in range(0, len(images), 2):
            draws = np.random.default_rng(int(numbers[first]))
            pair = slice(first, first + 2)
            if self.cutmix and (not self.mixup or draws.random() < 0.5):
                height, width = images.shape[2:]
                share = draws.beta(self.cutmix, self.cutmix)
                top, bottom, left, right = cut_box(height, width, share, draws)
                images[pair, :, top:bottom, left:right] = others[pair, :, top:bottom, left:right]
                shares[pair] = 1 - (bottom - top) * (right - left) / images[0, 0].numel()
            else:
                share = draws.beta(self.mixup, self.mixup)
                images[pair] = share * images[pair] + (1 - share) * others[pair]
                shares[pair] = share
        return batch | {OTHER_LABELS: swapped(batch["labels"]), SHARES: shares}


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """Each pair of rows in the opposite order."""
    return rows.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def cut_box(height: int, width: int, share: float, draws: Draws) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a box around a random pixel; but for the edges, `share` of all is outside."""
    high, wide = int(height * sqrt(1 - share)), int(width * sqrt(1 - share))
    top, left = int(draws.integers(height)) - high // 2, int(draws.integers(width)) - wide // 2
    return max(0, top), min(height, top + high), max(0, left), min(width, left + wide)
