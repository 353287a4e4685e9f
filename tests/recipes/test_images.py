"""Images with classes: sources, errors, the held-out share, and samples that depend on seed and number alone."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from crosshead.common.errors import RecipeError
from crosshead.common.progress import silent
from crosshead.recipes.data import image_sources
from crosshead.recipes.data.augmentation import Augmentation
from crosshead.recipes.data.images import ProcessImage, find_images, image_processor, read_images
from crosshead.recipes.schema.model_config import model_config
from crosshead.recipes.schema.objectives import Classes
from crosshead.recipes.schema.sections import DataOptions, DataSource
from crosshead.recipes.schema.toy import write_toy_images

COLUMNS = ("image", "label")
PLAIN = Augmentation((8, 8), Classes(crop=1.0, flip=False))
FULL = Augmentation((8, 8), Classes(crop=0.2, operations=2, erasing=0.5))
SIZE = (20, 12)


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_classes(folder: Path, counts: dict[str, int]) -> Path:
    """Write random images into a folder for each class."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(number := number + 1).save(folder / name / f"{index:02}.png")
    return folder


def options_of(tmp_path: Path, **changes):
    sources = (DataSource(str(tmp_path / "data"), "images"),)
    return replace(DataOptions(sources, cache=str(tmp_path / "cache")), **changes)


def find_image_inputs(options, channels=3, columns=COLUMNS):
    return find_images(options, columns, image_processor(8, channels), channels)


def open_image_data(options, channels=3, columns=COLUMNS, augmentation=PLAIN):
    inputs = find_image_inputs(options, channels, columns)
    training, evaluation = ProcessImage(inputs, augmentation), ProcessImage(inputs, None)
    return read_images(options, inputs, silent).prepared(training, evaluation)


@pytest.fixture
def options(tmp_path):
    write_classes(tmp_path / "data", {"cat": 9, "ant": 7, "bee": 8})
    return options_of(tmp_path)


def test_folders_are_classes_in_sorted_order(options, tmp_path):
    nested = tmp_path / "data" / "bee" / "more"
    nested.mkdir()
    picture(99).save(nested / "last.JPEG")
    (tmp_path / "data" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "data" / ".hidden").mkdir()
    assert find_image_inputs(options).classes == ("ant", "bee", "cat")
    (images,) = open_image_data(options).sources
    assert Counter(images.source.labels) == {0: 7, 1: 9, 2: 9} and images.indices == list(range(25))
    assert images.source.place(15) == str(nested / "last.JPEG") and images[15]["labels"] == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_held_out_images_match_image_processor(options, channels):
    """Bicubic resampling, a central crop of 7/8 of the shorter side, and pixel values from -1 to 1."""
    data = open_image_data(replace(options, evaluation=options.sources), channels)
    sample = data.evaluation[0]
    image = Image.open(data.sources[0].source.place(0)).convert("L" if channels == 1 else "RGB")
    wide = image.resize((15, 9), Image.Resampling.BICUBIC)  # 9 is 8 / (7/8) rounded down
    pixels = torch.from_numpy(np.array(wide)).float().view(9, 15, channels).permute(2, 0, 1) / 127.5 - 1
    offsets = [(top, left) for top in (0, 1) for left in (3, 4)]  # the centre may be rounded up or down
    assert any(torch.allclose(sample["pixel_values"], pixels[:, y : y + 8, x : x + 8], atol=1e-6) for y, x in offsets)
    assert int(sample["labels"]) == 0 and len(data.evaluation) == 24


@pytest.mark.parametrize("size", [16, 400])
def test_image_processor_crops_the_central_square_at_every_size(size):
    """The horizontal position of each pixel in an image of three squares side by side."""
    positions = np.broadcast_to(np.linspace(0, 255, 3 * size), (size, 3 * size)).astype(np.uint8)
    image = Image.fromarray(positions).convert("RGB")
    pixels = image_processor(size, 3)(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, size, size)
    assert float(pixels.abs().max()) == pytest.approx(7 / 8 / 3, abs=0.02)


def test_epochs_cover_each_image_once_and_samples_follow_seed(options):
    samples = open_image_data(options, augmentation=FULL).samples(60, seed=1)
    assert Counter(int(samples[number]["labels"]) for number in range(24)) == {0: 7, 1: 8, 2: 9}
    first = [samples[number]["pixel_values"] for number in range(48)]
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    state = (random.getstate(), torch.get_rng_state())
    again = open_image_data(options, augmentation=FULL).samples(60, seed=1)
    for number in (47, 3, 0):
        assert torch.equal(again[number]["pixel_values"], first[number])
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    assert not torch.equal(
        open_image_data(options, augmentation=FULL).samples(60, seed=2)[0]["pixel_values"], first[0]
    )
    plain = open_image_data(options).samples(48, seed=1)
    repeat = next(n for n in range(24, 48) if torch.equal(plain[n]["pixel_values"], plain[0]["pixel_values"]))
    assert not torch.equal(first[repeat], first[0])  # the same image with another augmentation in the next epoch
    with pytest.raises(IndexError):
        samples[60]


def test_held_out_images_are_chosen_by_content(options, tmp_path):
    def paths(parts):
        return {images.source.place(index) for images in parts for index in images.indices}

    def held(data):
        return paths(data.evaluation._samples.datasets)

    before = open_image_data(replace(options, held_out=0.3))
    held_out = held(before)
    assert 2 <= len(held_out) <= 14 and not held_out & paths(before.sources)
    assert len(held_out | paths(before.sources)) == 24
    copied = Path(sorted(held_out)[0])
    (tmp_path / "data" / "cat" / "copy.png").write_bytes(copied.read_bytes())
    picture(77).save(tmp_path / "data" / "ant" / "00a.Png")
    after = open_image_data(replace(options, held_out=0.3))
    new = {str(tmp_path / "data" / "cat" / "copy.png"), str(tmp_path / "data" / "ant" / "00a.Png")}
    assert held(after) - new == held_out and new <= held(after) | paths(after.sources)
    assert str(tmp_path / "data" / "cat" / "copy.png") in held(after)
    assert after.fingerprint != before.fingerprint


def test_image_digests_are_cached_until_a_file_changes(options, tmp_path, monkeypatch):
    first = open_image_data(options)
    digests = []
    digest = image_sources._digest
    monkeypatch.setattr(image_sources, "_digest", lambda *arguments: digests.append(arguments) or digest(*arguments))
    assert open_image_data(options).fingerprint == first.fingerprint and not digests
    picture(98).save(tmp_path / "data" / "bee" / "00.png")
    assert open_image_data(options).fingerprint != first.fingerprint and len(digests) == 24


def test_toy_images_differ_between_classes(tmp_path):
    write_toy_images(tmp_path / "data")
    options = options_of(tmp_path)
    assert find_image_inputs(options).classes == ("0_degrees", "135_degrees", "45_degrees", "90_degrees")
    (images,) = open_image_data(options, channels=1).sources
    changes = []  # class and ratio of changes between neighbouring pixels; upright stripes change along rows
    for index in range(len(images)):
        pixels = np.asarray(images[index]["image"]).astype(float)
        along, down = (np.abs(np.diff(pixels, axis=axis)).mean() for axis in (1, 0))
        changes.append((int(images[index]["labels"]), along / down))
    upright, flat = ([ratio for label, ratio in changes if label == kind] for kind in (0, 3))
    assert len(upright) == len(flat) == 12 and min(upright) > 1.5 > 1 / 1.5 > max(flat)


def write_dataset(tmp_path: Path, **columns) -> DataOptions:
    """Write a local copy of a Hub dataset, and return options that read it."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cat"])}
    features |= {"size": datasets.Value("float32"), "parts": datasets.Sequence(datasets.Value("int64"))}
    content = {"image": [picture(number) for number in range(6)], "label": [2, 0, 1, 2, 0, 1]} | columns
    kinds = datasets.Features({name: features.get(name, datasets.Value("string")) for name in content})
    (tmp_path / "copy").mkdir()
    datasets.Dataset.from_dict(content, kinds).to_parquet(tmp_path / "copy" / "train.parquet")
    return DataOptions((DataSource(str(tmp_path / "copy"), "hub"),), cache=str(tmp_path / "cache"))


def test_dataset_class_labels_give_classes(tmp_path):
    options = write_dataset(tmp_path)
    (images,) = open_image_data(options).sources
    assert find_image_inputs(options).classes == ("ant", "bee", "cat") and images.source.labels == [2, 0, 1, 2, 0, 1]
    assert images[3]["image"].tobytes() == picture(3).tobytes()
    assert images.source.place(3) == f"row 4 of the Hub dataset {tmp_path / 'copy'}"


def test_dataset_labels_may_be_strings(tmp_path):
    options = write_dataset(tmp_path, kind=["b", "a", "b", "a", "c", "b"])
    inputs = find_image_inputs(options, columns=("image", "kind"))
    assert inputs.classes == ("a", "b", "c") and inputs.sources[0].labels == [1, 0, 1, 0, 2, 1]


def test_splits_of_one_dataset_have_different_fingerprints(tmp_path):
    options = write_dataset(tmp_path)
    splits = [(replace(options.sources[0], split=split),) for split in ("train[:3]", "train[3:]")]
    parts = [open_image_data(replace(options, sources=sources)) for sources in splits]
    states = [part.sources[0].source.state() for part in parts]
    assert states[0] != states[1] and parts[0].fingerprint != parts[1].fingerprint
    assert parts[1].sources[0][0]["image"].tobytes() == picture(3).tobytes()


def truncate_image(folder: Path) -> None:
    path = folder / "ant" / "00.png"
    path.write_bytes(path.read_bytes()[:100])


def add_empty_class(folder: Path) -> None:
    (folder / "dog").mkdir()


def merge_into_one_class(folder: Path) -> None:
    (folder / "ant").rename(folder / "cat" / "more")
    (folder / "bee").rename(folder / "cat" / "others")


def remove_all_classes(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.mkdir()


def remove_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncate_image, "ant/00.png"),
        (add_empty_class, "data/dog"),
        (merge_into_one_class, "data have 1 "),
        (remove_all_classes, "data have 0 "),
        (remove_folder, "data "),
    ],
)
def test_unusable_image_folders_give_one_line_error(options, tmp_path, change, words):
    change(tmp_path / "data")
    with pytest.raises(RecipeError) as error:
        open_image_data(options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_sources_with_different_classes_are_refused(options, tmp_path):
    write_classes(tmp_path / "other", {"ant": 2, "bee": 2, "dog": 2})
    for section in ("sources", "evaluation"):
        changed = (*getattr(options, section), DataSource(str(tmp_path / "other"), "images"))
        with pytest.raises(RecipeError, match=r"other\b.*'dog'.*'cat'"):
            open_image_data(replace(options, **{section: changed}))


def test_empty_training_or_held_out_split_is_refused(options):
    with pytest.raises(RecipeError, match=r"data\.held_out=1e-09"):
        open_image_data(replace(options, held_out=1e-9))
    with pytest.raises(RecipeError, match=options.sources[0].path):
        open_image_data(replace(options, held_out=1 - 1e-9))


@pytest.mark.parametrize(
    ("columns", "content", "words"),
    [
        (("picture", "label"), {}, "no column 'picture'.*'image', 'label'"),
        (("image", "label"), {"label": [0, 1, 2, -1, 0, 1]}, "row 4 .* has no class in 'label'"),
        (("image", "label"), {"label": [0, 1, 2, 2, None, 1]}, "row 5 .* has no class in 'label'"),
        (("image", "size"), {"size": [0, 1, float("nan"), 1, 0, 1]}, "row 3 .* has no class in 'size'"),
        (("image", "parts"), {"parts": [[0], [1], [0, 1], [1], [0], [1]]}, "^the Hub .* has lists in 'parts'.*$"),
        (("image", "label"), {"image": [None, *map(picture, range(5))]}, "row 1 .*no image"),
    ],
)
def test_unusable_image_datasets_are_refused(tmp_path, columns, content, words):
    with pytest.raises(RecipeError, match=words):
        open_image_data(write_dataset(tmp_path, **content), columns=columns)


def test_full_disk_while_writing_digests_names_source_and_cache(options, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(RecipeError, match=rf"/data .*the cache {options.cache} .*No space left on device"):
        open_image_data(options)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("crosshead_vit", "image_size", 0),
        ("crosshead_vit", "image_size", [32, -1]),
        ("crosshead_vit", "image_size", "big"),
        ("crosshead_transnext", "window_size", -1),
    ],
)
def test_sizes_that_no_image_classifier_can_have_are_refused(model_type, key, value):
    with pytest.raises(RecipeError, match=rf"^model\.config: {key}="):
        model_config({"model_type": model_type, key: value}, Classes())
    assert model_config({"model_type": "crosshead_vit", "image_size": [32, 48]}, Classes()).image_size == [32, 48]
