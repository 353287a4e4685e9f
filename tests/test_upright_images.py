"""Images with an EXIF orientation are read upright in training, calibration, evaluation and inspection.

Images whose values Pillow would clip to 8 bits are refused everywhere.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from crosshead.common.errors import ConversionError, EvalError, RecipeError
from crosshead.common.images import model_image, open_processor, processed_image
from crosshead.evals.inspect.diffusion import _square
from crosshead.evals.open_model import open_config
from crosshead.evals.scoring.images import LabelledImages
from crosshead.recipes.data.image_sources import decoded
from image_toys import write_image_model

ORIENTATION = 0x0112
TURN_RIGHT = 6


def test_readers_apply_exif_orientation(tmp_path):
    """The upper half of the stored image is black; upright, the right half is."""
    stored = Image.new("RGB", (16, 16), "white")
    stored.paste("black", (0, 0, 16, 8))
    exif = Image.Exif()
    exif[ORIENTATION] = TURN_RIGHT
    file = tmp_path / "images" / "LABEL_0" / "photo.png"
    file.parent.mkdir(parents=True)
    stored.save(file, exif=exif)
    folder = write_image_model(tmp_path / "model")
    processor, config = open_processor(folder, "in model"), open_config(str(folder)).config
    images = [
        model_image(file, processor, config, "in model")[0],
        _square(file, 16, 3)[0],
        processed_image(file, LabelledImages(open_config(str(folder)), tmp_path / "images", None, 1).processor, 3)[0],
    ]
    for pixels in images:
        assert pixels[..., 9:].max() < pixels[..., :7].min()
    content = file.read_bytes()
    upright = decoded(None, 0, 3, content)
    assert upright.getpixel((2, 8)) == (255, 255, 255) and upright.getpixel((13, 8)) == (0, 0, 0)
    assert torch.equal(images[0], images[2])


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_readers_refuse_images_with_values_beyond_8_bits(tmp_path, kind):
    file = tmp_path / "depth.tif"
    Image.fromarray(np.linspace(0, 60_000, 256).astype(kind).reshape(16, 16)).save(file)
    processor = open_processor(write_image_model(tmp_path / "model"), "in model")
    with pytest.raises(ConversionError, match=r"depth\.tif.* 8 bits"):
        processed_image(file, processor, 3)
    with pytest.raises(EvalError, match=r"depth\.tif.* 8 bits"):
        _square(file, 16, 3)
    with pytest.raises(RecipeError, match=r"depth\.tif.* 8 bits"):
        decoded(SimpleNamespace(place=lambda index: str(file)), 0, 3, file.read_bytes())


def test_16_bit_image_with_8_bit_values_is_read(tmp_path):
    numbers = np.arange(256).reshape(16, 16)
    Image.fromarray(numbers.astype(np.uint16)).save(tmp_path / "small.png")
    image = decoded(None, 0, 1, (tmp_path / "small.png").read_bytes())
    assert np.array_equal(np.asarray(image), numbers)
