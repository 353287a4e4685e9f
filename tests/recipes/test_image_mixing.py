"""Crops, RandAugment and erasing keep to their bounds; mixup, CutMix and soft targets match the papers."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from crosshead.recipes.data.augmentation import OPERATIONS, Augmentation, changed, crop_box
from crosshead.recipes.data.image_mixing import MIXING, MixImages
from crosshead.recipes.schema.objectives import Classes
from crosshead.recipes.trainer.image_objective import SoftPredictions

CLASSES = 5


def batch_of(first: int, count: int, size: tuple[int, int] = (6, 9), seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return samples with random pixels, beginning with sample number `first` of a run."""
    draws = torch.Generator().manual_seed(5)
    images = torch.rand(first + count, 2, *size, generator=draws)
    labels = torch.randint(CLASSES, (first + count,), generator=draws)
    return [
        {"pixel_values": images[n], "labels": labels[n], MIXING: torch.tensor(1000 * seed + n)}
        for n in range(first, first + count)
    ]


def soft_targets(batch, count: int, smoothing: float) -> list[list[float]]:
    """Return target probabilities (rows, classes): the shares of both images' classes, then smoothed."""
    rows = []
    for row in range(count):
        share = float(batch["shares"][row])
        target = [smoothing / CLASSES] * CLASSES
        target[int(batch["labels"][row])] += (1 - smoothing) * share
        target[int(batch["other_labels"][row])] += (1 - smoothing) * (1 - share)
        rows.append(target)
    return rows


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_cross_entropy_with_soft_targets(smoothing):
    batch = MixImages(mixup=0.8, cutmix=1.0)(batch_of(0, 6))
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = []
    for row, target in zip(logits.tolist(), soft_targets(batch, 6, smoothing), strict=True):
        total = math.log(sum(map(math.exp, row)))
        expected.append(-sum(share * (logit - total) for share, logit in zip(target, row, strict=True)))
        assert sum(target) == pytest.approx(1)
    result = SoftPredictions("", logits, batch["labels"], batch["other_labels"], batch["shares"], smoothing).losses
    assert result.tolist() == pytest.approx(expected, rel=1e-5)
    unmixed = MixImages(mixup=0.0, cutmix=0.0)(batch_of(0, 5))
    assert set(unmixed["shares"].tolist()) == {1.0} and torch.equal(unmixed["other_labels"], unmixed["labels"])


def test_mixup_is_weighted_mean_of_image_pair():
    samples = batch_of(0, 40)
    batch = MixImages(mixup=0.8, cutmix=0.0)(samples)
    for row in range(40):
        other, share = samples[row ^ 1], float(batch["shares"][row])
        expected = share * samples[row]["pixel_values"] + (1 - share) * other["pixel_values"]
        assert torch.allclose(batch["pixel_values"][row], expected, atol=1e-6)
        assert batch["other_labels"][row] == other["labels"] and batch["labels"][row] == samples[row]["labels"]
        assert batch["shares"][row] == batch["shares"][row ^ 1]
    assert len(set(batch["shares"].tolist())) == 20
    assert MIXING not in batch


def test_cutmix_pastes_a_box_with_share_from_its_area():
    samples = batch_of(0, 40)
    batch = MixImages(mixup=0.0, cutmix=1.0)(samples)
    for row in range(40):
        own, other = (samples[index]["pixel_values"] for index in (row, row ^ 1))
        mixed = batch["pixel_values"][row]
        is_cut = (mixed != own).any(0)
        assert torch.equal(mixed[:, is_cut], other[:, is_cut])
        assert float(batch["shares"][row]) == pytest.approx(1 - is_cut.sum().item() / is_cut.numel())
        if is_cut.any():  # a whole box
            rows, columns = is_cut.nonzero().min(0).values, is_cut.nonzero().max(0).values + 1
            assert is_cut[rows[0] : columns[0], rows[1] : columns[1]].all()
    assert 0.4 < float(batch["shares"].mean()) < 0.9


def test_mixup_shares_follow_beta_distribution():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    mix = MixImages(mixup=0.8, cutmix=0.0)
    shares = torch.cat([mix(batch_of(first, 400, (1, 1)))["shares"] for first in range(0, 2000, 400)])[::2]
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.var()) == pytest.approx(1 / (4 * 2.6), rel=0.1)


def test_mixing_does_not_depend_on_micro_batches():
    mix = MixImages(mixup=0.8, cutmix=1.0)
    whole = mix(batch_of(8, 8))
    halves = [mix(batch_of(8, 8)[:4]), mix(batch_of(8, 8)[4:])]
    for name in whole:
        assert torch.equal(whole[name], torch.cat([half[name] for half in halves]))
    other_seed = mix(batch_of(8, 8, seed=4))
    assert not torch.equal(whole["shares"], other_seed["shares"])


def test_evaluation_samples_are_not_mixed():
    samples = [{name: value for name, value in sample.items() if name != MIXING} for sample in batch_of(0, 3)]
    batch = MixImages(mixup=0.8, cutmix=1.0)(samples)
    assert set(batch) == {"pixel_values", "labels"}
    assert torch.equal(batch["pixel_values"][2], samples[2]["pixel_values"])


def test_crop_boxes_keep_area_and_ratio_bounds():
    areas, lefts = [], set()
    for seed in range(300):
        left, top, right, bottom = crop_box(400, 300, 0.08, np.random.default_rng(seed))
        assert 0 <= left < right <= 400 and 0 <= top < bottom <= 300
        ratio, area = (right - left) / (bottom - top), (right - left) * (bottom - top) / 120_000
        assert 0.74 < ratio < 1.35 and 0.07 < area <= 1
        areas.append(area)
        lefts.add(left)
    assert min(areas) < 0.15 and max(areas) > 0.85 and len(lefts) > 100


def test_image_too_narrow_for_crops_is_center_cropped():
    assert crop_box(1000, 30, 0.9, np.random.default_rng(0)) == (480, 0, 520, 30)
    assert crop_box(30, 1000, 0.9, np.random.default_rng(0)) == (0, 480, 30, 520)
    assert crop_box(32, 32, 1.0, np.random.default_rng(0)) == (0, 0, 32, 32)


def image_of(mode: str) -> Image.Image:
    """Return an image of random pixels, neither black nor white."""
    shape = (24, 30) if mode == "L" else (24, 30, 3)
    return Image.fromarray(np.random.default_rng(1).integers(20, 220, shape, dtype=np.uint8))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_keep_size_and_mode_and_depend_on_strength(operation, mode):
    image = image_of(mode)
    strong = changed(image, operation, 0.9, np.random.default_rng(0))
    assert strong.size == image.size and strong.mode == mode
    if operation == "identity" or (operation, mode) == ("color", "L"):
        assert strong.tobytes() == image.tobytes()
    else:
        assert strong.tobytes() != image.tobytes()
    if operation not in ("equalize", "autocontrast"):
        unchanged = changed(image, operation, 0.0, np.random.default_rng(0))
        difference = np.abs(np.asarray(unchanged).astype(int) - np.asarray(image))
        assert difference.max() <= (1 if operation != "solarize" else 0)


def test_solarize_posterize_brightness_and_translate_results():
    image = image_of("L")
    pixels = np.asarray(image).astype(int)
    solarized = np.asarray(changed(image, "solarize", 0.5, np.random.default_rng(0)))
    assert (solarized == np.where(pixels < 128, pixels, 255 - pixels)).all()
    assert (np.asarray(changed(image, "posterize", 1.0, np.random.default_rng(0))) == pixels // 16 * 16).all()
    bright, dark = (np.asarray(changed(image, "brightness", 1.0, np.random.default_rng(seed))) for seed in (0, 1))
    assert {bright.mean() > pixels.mean(), dark.mean() > pixels.mean()} == {True, False}
    moved = {np.asarray(changed(image, "translate_y", 1.0, np.random.default_rng(seed)))[0].any() for seed in (0, 1)}
    assert moved == {True, False}  # up, and down below an empty edge


def test_random_erasing_replaces_one_box_by_noise():
    augmentation = Augmentation((32, 48), Classes(erasing=1.0))
    pixels = torch.full((3, 32, 48), 7.0)
    shares = []
    for seed in range(50):
        erased = augmentation.pixels(pixels, np.random.default_rng(seed)) != 7
        assert (erased[0] == erased[1]).all()
        height, width = (erased[0].any(axis).sum().item() for axis in (1, 0))
        assert height * width == erased[0].sum()
        shares.append(height * width / (32 * 48))
        assert 0.25 < width / height < 4
    assert min(shares) > 0.01 and 0.2 < max(shares) < 0.35
    assert (pixels == 7).all()
    never = Augmentation((32, 48), Classes(erasing=0.0))
    assert never.pixels(pixels, np.random.default_rng(0)) is pixels
