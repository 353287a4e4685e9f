"""Data collator for mixup and CutMix: mixes the two images of each pair in a batch, with soft targets.

Samples 2k and 2k + 1 of a run form a pair, and a random number in the first of them seeds the mixing. So a step does
not depend on its division into micro batches of even size, nor on the number of processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from .training_data import Draws, Sample

MIXING = "mixing"
"""Key of a training sample: the random number that seeds the mixing of its pair."""
OTHER_LABELS, SHARES = "other_labels", "shares"
"""Keys of a training batch: the class of each image's partner (B), and the weight of the image's own class (B)."""


@dataclass(frozen=True)
class MixImages:
    """Collate samples into a batch; training samples, which have the key `MIXING`, are mixed in pairs."""

    mixup: float
    """Weights of a pair are drawn from Beta(mixup, mixup) (Zhang et al., 2018); 0 disables mixup."""
    cutmix: float
    """The area that an image keeps is drawn from Beta(cutmix, cutmix) (Yun et al., 2019); 0 disables CutMix. With
    mixup and CutMix, each pair gets one of the two at random."""

    def __call__(self, samples: Sequence[Sample]) -> Sample:
        """Return images (B, channels, height, width), labels (B) and, in training, partner labels and weights."""
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
    """Swap rows 2k and 2k + 1 of a tensor with an even number of rows."""
    return rows.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def cut_box(height: int, width: int, share: float, draws: Draws) -> tuple[int, int, int, int]:
    """Return top, bottom, left and right of a box around a random pixel, clipped to the image.

    Before clipping, the fraction `share` of the area is outside the box.
    """
    high, wide = int(height * sqrt(1 - share)), int(width * sqrt(1 - share))
    top, left = int(draws.integers(height)) - high // 2, int(draws.integers(width)) - wide // 2
    return max(0, top), min(height, top + high), max(0, left), min(width, left + wide)
