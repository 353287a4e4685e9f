"""The shipped recipes for scikit-learn's digits learn from real images in a short run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.train import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with a subfolder for each digit."""
    root = tmp_path_factory.mktemp("digits")
    for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        folder = root / str(label)
        folder.mkdir(exist_ok=True)
        Image.fromarray((pixels.reshape(8, 8) * 15.9375).astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture
def train_metrics(images: Path, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """A function that trains a recipe on `samples` images and returns its metrics on held-out images."""

    def run(name: str, samples: int) -> dict[str, float]:
        changes = (
            f"output={tmp_path / 'run'}",
            f"data.sources=[{{path: {images}, kind: images}}]",
            f"data.cache={tmp_path / 'cache'}",
            f"train.samples={samples}",
        )
        measured: dict[str, float] = train(load_recipe(name, changes)).metrics
        return measured

    return run


def test_vit_classifies_digits(train_metrics: Callable[..., dict[str, float]]) -> None:
    measured = train_metrics("small/digits_vit", 32_000)
    assert measured["eval_accuracy"] > 0.85


def test_dit_denoises_digits(train_metrics: Callable[..., dict[str, float]]) -> None:
    pytest.importorskip("diffusers")
    assert train_metrics("small/digits_dit", 25_600)["eval_loss"] < 0.4  # 1 without learning
