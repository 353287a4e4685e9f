"""Models that read images of any size, like the published DINOv2: their image processors set the size.

`image_size` of facebook/dinov2-base is 518, and its image processor gives squares of 224 pixels.
"""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

import crosshead
from crosshead.common.errors import ConversionError, RecipeError
from crosshead.evals.inspect.inputs import Inputs
from crosshead.evals.inspect.report import inspect_report
from crosshead.evals.scoring.files import class_folders
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import ONE_GPU
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import write_toy_images
from crosshead.recipes.train import train
from image_toys import write_image_model, write_images

LARGE, SIDE, PATCH = 28, 16, 4
"""Side of the images in pretraining, of those that the processor gives, and of a patch."""


@pytest.fixture
def source(tmp_path):
    """A DINOv2 for images of any size, whose processor gives smaller ones than its config names."""
    folder = write_image_model(tmp_path / "source", "Dinov2", image_size=LARGE, patch_size=PATCH, num_labels=4)
    processor = BitImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(folder)
    return folder


def without_crop(folder):
    """Change the image processor of a model: its images keep their aspect ratio."""
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_center_crop": False}))


def test_conversion_calibrates_and_verifies_with_images_of_the_processor(source, tmp_path):
    images = write_images(tmp_path / "images", 6)
    report = crosshead.convert(source, tmp_path / "made", {"mixture": {"active_heads": 3}}, calibration=images)
    assert report["calibration"]["images"] == "images"
    measured = crosshead.verify(source, tmp_path / "made", text=images)["verification"]
    assert measured["images"] == 6 and 0.5 < measured["token_cosine"] < 1


def test_images_of_different_sizes_are_refused_in_calibration(source, tmp_path):
    without_crop(source)
    images = write_images(tmp_path / "images", 3)
    Image.new("RGB", (12, 20)).save(images / "tall.png")
    with pytest.raises(ConversionError, match=r"from 20 x 33 to 33 x 20: .*do_center_crop"):
        crosshead.convert(source, tmp_path / "made", {"mixture": {"active_heads": 3}}, calibration=images)


def test_inspect_uses_the_size_of_the_processor(source, tmp_path):
    images = write_images(tmp_path / "images", 2)
    report = inspect_report([str(source)], Inputs(image={"0.png": images / "0.png"}), lambda *_: None)
    (text,) = report["models"][0]["texts"]
    assert (text["image"]["rows"], text["image"]["columns"]) == (SIDE // PATCH, SIDE // PATCH)
    assert len(text["tokens"]) == 1 + (SIDE // PATCH) ** 2


def recipe_of(source, tmp_path):
    """A recipe that continues the model on toy images."""
    write_toy_images(tmp_path / "images")
    content = {
        "output": str(tmp_path / "out"),
        "model": {"path": str(source)},
        "objective": {"name": "classes"},
        "data": {"sources": [{"path": str(tmp_path / "images"), "kind": "images"}], "cache": str(tmp_path / "cache")},
        "train": {"learning_rate": 1e-3, "samples": 8, "batch_samples": 4, "dtype": "float32"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(content))
    return load_recipe(path)


def test_training_uses_the_size_of_the_processor(source, tmp_path):
    recipe = recipe_of(source, tmp_path)
    forward_tokens = []
    model = AutoModelForImageClassification.from_pretrained(train(recipe).model)
    model.dinov2.encoder.register_forward_pre_hook(lambda _, inputs: forward_tokens.append(inputs[0].shape[1]))
    with torch.no_grad():
        model(torch.zeros(1, 3, SIDE, SIDE))
    assert forward_tokens == [1 + (SIDE // PATCH) ** 2]
    small = dry_run(recipe, ONE_GPU)["memory_per_gpu"]["activations"]
    processor = BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": LARGE, "width": LARGE})
    processor.save_pretrained(source)
    assert dry_run(recipe, ONE_GPU)["memory_per_gpu"]["activations"] > 1.5 * small


def test_training_without_a_fixed_size_is_refused(source, tmp_path):
    without_crop(source)
    with pytest.raises(RecipeError, match=r"different sizes, such as 20 x 40: .*do_center_crop"):
        train(recipe_of(source, tmp_path))


def test_hidden_images_are_skipped(source, tmp_path):
    """macOS writes a `._photo.png` with metadata beside each photo, and notebooks write `.ipynb_checkpoints`."""
    images = tmp_path / "images"
    write_toy_images(images)
    (images / "0_degrees" / "._0.png").write_bytes(b"no image")
    (images / "0_degrees" / ".ipynb_checkpoints").mkdir()
    (images / "0_degrees" / ".ipynb_checkpoints" / "1.png").write_bytes(b"no image")
    assert train(recipe_of(source, tmp_path)).steps == 2
    crosshead.convert(source, tmp_path / "made", {"mixture": {"active_heads": 3}}, calibration=images)
    assert not [file for files in class_folders(images).values() for file in files if "/." in str(file)]


def test_file_that_is_no_image_is_named_without_python_objects(source, tmp_path):
    recipe = recipe_of(source, tmp_path)
    (tmp_path / "images" / "0_degrees" / "new.png").write_bytes(b"no image")
    with pytest.raises(RecipeError, match=r"new\.png cannot be read as an image: Pillow does not know its format: "):
        train(recipe)
