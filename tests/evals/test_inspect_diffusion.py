"""`crosshead inspect` of a DiT, against the oracle in float64."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from broken import run, snapshot
from image_toys import write_image_model
from packed import maps, numbers, unpack
from tiers import first

pytest.importorskip("diffusers")
import dit_oracle
import dit_toys
from crosshead.recipes.trainer.noise_loss import noise_schedule

CASES = {
    "stock": None,
    "mixture": dit_toys.MIXTURE,
    "knocking+gating": {"knocking": {"on": ["query", "key", "value"]}, "gating": {}},
}


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The working directory, with an image of 6 x 6 pixels."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(256, (6, 6, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def report(capfd, monkeypatch):
    """A function that runs the command and returns the only model of the report."""

    def measured(*arguments):
        status, _, err = run(capfd, monkeypatch, ["inspect", *arguments, "--overwrite", "--out", "page.html"])
        assert (status, err) == (0, "")
        with open("page.json", encoding="utf-8") as file:
            (model,) = json.load(file)["models"]
        return model

    return measured


def noisy(pixels, time):
    """Return the noised image (channels, height, width) at a time step of DiT's linear schedule."""
    signal = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000, dtype=np.float64))[time]
    noise = torch.randn(1, *pixels.shape, generator=torch.Generator().manual_seed(0))[0].double()
    return signal**0.5 * pixels + (1 - signal) ** 0.5 * noise


@pytest.mark.parametrize("case", first(["mixture", "stock", "knocking+gating"]))
@pytest.mark.parametrize("time", first([250, 0]))
def test_dit_blocks_match_oracle(workdir, report, case, time):
    mixers = CASES[case]
    model = dit_toys.stock_dit() if mixers is None else dit_toys.our_dit(mixers)
    model.save_pretrained(workdir / "dit")
    noise_schedule().save_pretrained(workdir / "dit")
    model_record = report("dit", "--image", "image.png", "--time", str(time))
    sizes = {
        name: model_record[name] for name in ("layers", "query_heads", "key_value_heads", "head_dim", "parameters")
    }
    assert sizes == {
        "layers": 2,
        "query_heads": 4,
        "key_value_heads": 4,
        "head_dim": 8,
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    (text,) = model_record["texts"]
    assert text["name"] == f"image.png at time {time}"
    assert text["tokens"] == [f"patch ({row}, {column})" for row in range(3) for column in range(3)]
    image = np.asarray(Image.open("image.png"))
    assert (unpack(text["image"]["picture"]).reshape(6, 6, 3) % 256 == image).all()

    pixels = torch.from_numpy(image.astype(np.float64) / 127.5 - 1).permute(2, 0, 1)
    weights = {name: each.detach().double() for name, each in model.named_parameters()}
    per_block = [{} if mixers is None else model.mixers_of_layer(block) for block in range(2)]
    _, blocks = dit_oracle.model(noisy(pixels, time), time, 7, weights, model.config, per_block)
    for record, expected in zip(text["layers"], blocks, strict=True):
        shown = expected["weights"]
        assert torch.allclose(maps(record["maps"]), shown, atol=0.02)
        assert torch.allclose(numbers(record["keys"]["weight"])[:, :, 0], shown.amax(-1), atol=1e-3)
        assert (record["routing"] is not None) == (case == "mixture")
        if record["routing"]:
            assert torch.allclose(numbers(record["routing"]["gates"]), expected["gates"].T, atol=1e-3)
            assert torch.allclose(numbers(record["routing"]["scores"]), expected["probabilities"].T, atol=1e-3)
            measured = numbers(record["output_norms"])
            assert (measured > 0).equal(expected["gates"].T > 0)


def test_dit_pipeline_maps_match_oracle_on_latents_of_its_vae(workdir, report):
    pipeline = dit_toys.pipeline()
    pipeline.save_pretrained(workdir / "pipeline")
    pixels = torch.from_numpy(np.asarray(Image.open("image.png")) / np.float32(127.5) - 1).permute(2, 0, 1)
    with torch.no_grad():
        latents = pipeline.vae.encode(pixels[None]).latent_dist.mean[0].double() * pipeline.vae.config.scaling_factor
    model, shown = pipeline.transformer, []
    weights = {name: each.detach().double() for name, each in model.named_parameters()}
    for time in (0, 999):
        (text,) = report("pipeline", "--image", "image.png", "--time", str(time))["texts"]
        assert len(text["tokens"]) == 9
        _, blocks = dit_oracle.model(noisy(latents, time), time, 1000, weights, model.config, [{}, {}])
        for record, expected in zip(text["layers"], blocks, strict=True):
            assert torch.allclose(maps(record["maps"]), expected["weights"], atol=0.02)
            assert torch.allclose(numbers(record["keys"]["weight"])[:, :, 0], expected["weights"].amax(-1), atol=1e-3)
        shown.append(text["layers"][0]["maps"]["data"])
    assert shown[0] != shown[1]


def test_refused_arguments_give_one_line_error(workdir, capfd, monkeypatch):
    dit_toys.our_dit({}).save_pretrained(workdir / "dit")
    dit_toys.pipeline().save_pretrained(workdir / "pipeline")
    shutil.copytree("dit", "broken")
    (workdir / "broken" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    write_image_model(workdir / "vit")
    before = snapshot(workdir)
    uses = {
        ("dit", "--image", "image.png", "--time", "1000"): "--time 1000",
        ("dit", "--text", "some words"): "--text",
        ("dit", "--image", "none.png"): "none.png",
        ("dit", "--image", "dit/config.json"): "config.json",
        ("broken", "--image", "image.png"): "broken",
        ("pipeline/transformer", "--image", "image.png"): "4 channels",
        ("vit", "--image", "image.png", "--time", "3"): "--time",
    }
    for arguments, words in uses.items():
        status, out, err = run(capfd, monkeypatch, ["inspect", *arguments, "--out", "page.html"])
        assert (status, out) == (1, ""), arguments
        assert err.startswith("crosshead: error: ") and err.count("\n") == 1 and words in err, err
        assert snapshot(workdir) == before
