"""DINOv2 and TransNeXt read images of any size: their image processors set it.

`image_size` of facebook/dinov2-base is 518, and its image processor gives squares of 224 pixels.
"""

import json
from functools import partial

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, Dinov2ForImageClassification, Dinov2Model
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

import crosshead
import transnext_toys
from broken import edit_json, run
from crosshead.common.errors import ConversionError, RecipeError
from crosshead.evals.cost.counting import FLOPS, TRAINING_PASSES, multiplications
from crosshead.evals.inspect.inputs import Inputs
from crosshead.evals.inspect.report import inspect_report
from crosshead.evals.scoring.files import class_folders
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import ONE_GPU
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import write_toy_images
from crosshead.recipes.train import train
from crosshead.recipes.trainer.objectives import objective_of
from image_toys import write_image_model, write_images
from toy_checkpoints import write_stock

LARGE, SIDE, PATCH = 28, 16, 4
"""Side of the images in pretraining, of those that the processor gives, and of a patch."""


@pytest.fixture
def source(tmp_path):
    """A DINOv2 for images of any size, whose processor gives smaller ones than its config names."""
    folder = write_image_model(tmp_path / "source", "Dinov2", image_size=LARGE, patch_size=PATCH, num_labels=4)
    processor = BitImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return partial(run, capfd, monkeypatch)


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
    return load_recipe(write_recipe(source, tmp_path))


def write_recipe(source, tmp_path):
    """Write the recipe and its images; return its path."""
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
    return path


def test_training_uses_the_size_of_the_processor(source, tmp_path, monkeypatch):
    recipe, shapes, stock = recipe_of(source, tmp_path), [], Dinov2Model.forward

    def recording(self, pixel_values, **options):
        shapes.append(tuple(pixel_values.shape[1:]))
        return stock(self, pixel_values, **options)

    monkeypatch.setattr(Dinov2Model, "forward", recording)
    train(recipe)
    assert set(shapes) == {(3, SIDE, SIDE)}
    small = dry_run(recipe, ONE_GPU)
    processor = BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": LARGE, "width": LARGE})
    processor.save_pretrained(source)
    large = dry_run(recipe, ONE_GPU)
    assert large["parameters"] == small["parameters"]
    with torch.device("meta"):
        model = Dinov2ForImageClassification(AutoConfig.from_pretrained(source))
        images = [torch.zeros(1, 3, side, side) for side in (SIDE, LARGE)]
    for report, image in zip((small, large), images, strict=True):
        forward = multiplications(partial(model, image))
        assert report["training_flops_per_sample"] == TRAINING_PASSES * FLOPS * forward
    assert large["memory_per_gpu"]["activations"] > 1.5 * small["memory_per_gpu"]["activations"]


@pytest.mark.parametrize("model_type", ["crosshead_dinov2", "crosshead_vit"])
def test_dry_run_needs_no_model(model_type, tmp_path):
    """The model of a recipe may be made later; the processor, and for DINOv2 the size, are unknown until then."""
    content = json.loads((recipe_file := write_recipe(tmp_path / "nowhere", tmp_path)).read_text())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    content["model"]["config"] = {"model_type": model_type, "image_size": LARGE, "patch_size": PATCH, **sizes}
    recipe_file.write_text(json.dumps(content))
    report = dry_run(load_recipe(recipe_file), ONE_GPU)
    assert report["counted_from"] == "model.config" and report["training_flops_per_sample"] > 0


def test_training_reads_transnext_images_of_the_size_of_the_processor(tmp_path):
    model = transnext_toys.model_of({}, image_size=96, num_labels=4)
    model.save_pretrained(tmp_path / "source")
    processor = BitImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path / "source")
    recipe = recipe_of(tmp_path / "source", tmp_path)
    objective = objective_of(recipe)
    data = objective.open_data(objective.load_processor(), model.config, lambda *_: None)
    assert data.samples(4, 0)[0]["pixel_values"].shape == (3, 64, 64)


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


@pytest.mark.parametrize("backbone", ["dinov2", "transnext"])
def test_cost_of_an_image_of_another_size(source, backbone, run_cli, tmp_path):
    """Each count but that of weights is the one of a model whose config names this size."""
    if backbone == "transnext":
        transnext_toys.model_of({}, image_size=96, num_labels=4).save_pretrained(source)

    def report(arguments):
        status, out, _ = run_cli(f"cost {source} --json {arguments}")
        assert status == 0
        return json.loads(out)

    side = {"dinov2": SIDE, "transnext": 64}[backbone]
    large, small = report(""), report(f"--image-size {side}")
    edit_json(source, "config.json", image_size=side)
    named = report("")
    assert "image_size" not in large and small["image_size"] == side
    assert small["length"] == named["length"] == (side // PATCH) ** 2 + (backbone == "dinov2")
    assert small["cost"]["parameters"] == large["cost"]["parameters"]
    work = [count for count in named["cost"] if count.endswith(("multiplications", "flops"))]
    assert small["cost"]["input_flops"] < large["cost"]["input_flops"]
    assert [small["cost"][count] for count in work] == [named["cost"][count] for count in work]


def test_cost_of_a_wrong_image_size_is_refused(source, run_cli, tmp_path):
    write_image_model(tmp_path / "vit", "ViT")
    write_stock(tmp_path / "text")
    for model, size, word in (
        (source, 3, "4 to 65,536"),
        (source, 10**20, "4 to 65,536"),
        (tmp_path / "vit", 64, "one size"),
        (tmp_path / "text", 64, "not read"),
    ):
        status, out, err = run_cli(f"cost {model} --image-size {size}")
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert f"image_size={size}" in err and word in err
