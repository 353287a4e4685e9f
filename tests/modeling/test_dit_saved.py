"""DiT with mechanisms: saving and loading of models and pipelines, with and without crosshead."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("diffusers")

from diffusers import DiTPipeline

from crosshead.modeling.dit import CODE, CrossheadDiTTransformer2DModel
from dit_toys import LABELS, LATENTS, MIXTURE, NEUTRAL, TIMES, our_dit, pipeline, samples, stock_dit

ORDERED: dict[str, Any] = {
    "mixture": {"active_heads": [2, 3]},
    "knocking": {"layers": [1]},
    "gating": {"layers": [0]},
}
"""Mechanisms in non-alphabetical order that differ per block."""


@torch.no_grad()
def prediction(model: Any) -> torch.Tensor:
    """Return the model's prediction for fixed noisy latents."""
    return model(LATENTS.to(model.dtype), TIMES, LABELS).sample


@pytest.mark.oldest
@pytest.mark.parametrize("mixers", [MIXTURE, ORDERED, {}], ids=["mixture", "several", "none"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, "10GB"), (torch.bfloat16, "30KB")])
def test_saved_model_loads_with_same_config_and_prediction(
    mixers: dict[str, Any], dtype: torch.dtype, size: str, tmp_path: Path
) -> None:
    model = our_dit(mixers).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=size)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", f"{CODE}.py"} < files
    assert ("diffusion_pytorch_model.safetensors" in files) == (size == "10GB")
    config = json.loads((tmp_path / "config.json").read_bytes())
    assert list(config["mixers"]) == list(mixers)  # in the order given
    assert config["mixers"] == model.mixers
    loaded = CrossheadDiTTransformer2DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    # Position embeddings are not saved: diffusers recomputes them in float32.
    assert torch.equal(prediction(loaded.to(dtype)), prediction(model))
    assert json.loads(loaded.to_json_string()) == config | {"_name_or_path": str(tmp_path)}


@pytest.mark.parametrize("at_once", [True, False])
def test_stock_checkpoints_load_with_new_mechanisms(at_once: bool, tmp_path: Path) -> None:
    stock = stock_dit()
    stock.save_pretrained(tmp_path)
    load = CrossheadDiTTransformer2DModel.from_pretrained
    neutral, report = load(tmp_path, mixers=NEUTRAL, low_cpu_mem_usage=at_once, output_loading_info=True)
    assert torch.equal(prediction(neutral), prediction(stock))
    assert all(".mixers.mixture." in name for name in report["missing_keys"])
    assert len(report["missing_keys"]) == 6
    half = load(tmp_path, mixers=MIXTURE, low_cpu_mem_usage=at_once, torch_dtype=torch.bfloat16)
    for name, parameter in half.named_parameters():
        assert parameter.dtype == torch.bfloat16
        if ".mixers." in name:
            assert 0.01 < parameter.std() < 0.03, name
    assert torch.equal(prediction(load(tmp_path)), prediction(stock))
    with pytest.raises(ValueError, match="device_map='cpu'"):
        load(tmp_path, mixers=MIXTURE, device_map="cpu")


def test_pickled_model_gives_same_prediction() -> None:
    model = our_dit(MIXTURE)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert torch.equal(prediction(again), prediction(model))


def test_pipeline_with_neutral_start_samples_stock_images() -> None:
    made = pipeline()
    stock = made.transformer
    expected = {guidance: samples(made, guidance) for guidance in (4.0, 1.0)}
    made.transformer = CrossheadDiTTransformer2DModel.from_transformer(stock, NEUTRAL)
    assert all(torch.equal(samples(made, guidance), images) for guidance, images in expected.items())
    with pytest.raises(ValueError, match="set_processor"):
        made.disable_xformers_memory_efficient_attention()
    made.enable_attention_slicing()  # has no effect on DiT
    assert torch.equal(samples(made), expected[4.0])
    made.transformer = CrossheadDiTTransformer2DModel.from_transformer(stock, MIXTURE)
    assert (samples(made) - expected[4.0]).abs().max() > 0.01
    assert made.config.transformer == (CODE, "CrossheadDiTTransformer2DModel")


def test_saved_pipelines_load_without_crosshead(warm_process: Any, tmp_path: Path) -> None:
    stock = pipeline()
    stock.transformer = CrossheadDiTTransformer2DModel.from_transformer(stock.transformer, ORDERED)
    stock.save_pretrained(tmp_path / "pipeline")
    expected = samples(stock)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiTPipeline.from_pretrained(tmp_path / "pipeline")
    worker = Path(__file__).with_name("dit_remote_worker.py")
    command, environment = [sys.executable, "-P", str(worker), str(tmp_path)], os.environ | {"HF_HUB_OFFLINE": "1"}
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for name, images in load_file(tmp_path / "images.safetensors").items():
        assert torch.equal(images, expected), name
    folders = [tmp_path / name / "transformer" / f"{CODE}.py" for name in ("pipeline", "again")]
    assert folders[0].read_bytes() == folders[1].read_bytes()
    transformer = CrossheadDiTTransformer2DModel.from_pretrained(tmp_path / "again", subfolder="transformer")
    ours = DiTPipeline(transformer, stock.vae, stock.scheduler)
    ours.set_progress_bar_config(disable=True)
    assert torch.equal(samples(ours), expected)
