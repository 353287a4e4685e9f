"""Training a DiT by a recipe: samples, latents, losses, checkpoints, averages and the result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import Trainer

pytest.importorskip("diffusers")

from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, DiTPipeline, DiTTransformer2DModel

from crosshead.common.errors import RecipeError
from crosshead.modeling.dit import CrossheadDiTTransformer2DModel
from crosshead.recipes.schema.dit_config import DiTFields
from crosshead.recipes.schema.recipe import Recipe, load_recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.noise_objective import Noise
from toy_diffusion import LATENTS, PIXELS, recipe
from toy_training import losses, metrics, resumed
from training_sessions import Run

EMBEDDING = ".norm1.emb."


def weights(made: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(made.output, "model", "diffusion_pytorch_model.safetensors"))


def objective_and_data(made: Recipe) -> tuple[Noise, Any]:
    """Return the objective and the data of a recipe."""
    objective = Noise(made)
    return objective, objective.open_data(objective.load_processor(), DiTFields(**made.model.config or {}), print)


def test_dit_learns_and_eval_loss_is_of_averaged_weights(tmp_path: Path) -> None:
    made = recipe(
        tmp_path, *PIXELS, steps=40, every=40, batch_samples=8, micro_batch=8, learning_rate=5e-3, average=0.9
    )
    train(made)
    values, last = losses(made), metrics(made)[-1]
    assert values[0] == pytest.approx(1, abs=0.3) and sum(values[-10:]) / 10 < 0.6
    folder = Path(made.output, "model")
    model = CrossheadDiTTransformer2DModel.from_pretrained(folder).eval()
    schedule = DDPMScheduler.from_pretrained(folder)
    _, data = objective_and_data(made)
    errors = []
    for sample in data.evaluation:
        clean, noise, times = (sample[name][None] for name in ("pixel_values", "noise", "timesteps"))
        with torch.no_grad():
            predicted = model(schedule.add_noise(clean, noise, times), times, sample["labels"][None]).sample
        errors.append(functional.mse_loss(predicted, noise).item())
    assert last["eval_loss"] == pytest.approx(sum(errors) / len(errors), abs=1e-5)
    assert "eval_accuracy" not in last and len(errors) > 2
    stock = DiTTransformer2DModel.load_config(folder)
    assert stock["num_layers"] == 4 and list(stock["mixers"]) == ["mixture"]


@pytest.mark.parametrize("changes", [pytest.param(PIXELS, marks=pytest.mark.slow), ()], ids=["pixels", "latents"])
def test_resumed_run_is_bitwise_equal(changes: tuple[str, ...], tmp_path: Path) -> None:
    once, again = (recipe(tmp_path / name, *changes) for name in ("once", "again"))
    train(once)
    resumed(again, 3)
    assert losses(once) == losses(again)
    assert metrics(once)[-1]["eval_loss"] == metrics(again)[-1]["eval_loss"]
    expected = weights(once)
    assert all(torch.equal(part, expected[name]) for name, part in weights(again).items())
    assert not (Path(once.output) / "model" / "vae").exists()


def test_result_is_weight_average_with_shared_embedding(tmp_path: Path) -> None:
    made = recipe(tmp_path, *PIXELS, every=1)
    train(made)
    steps = [load_file(Path(made.output, f"checkpoint-{step}", "model.safetensors")) for step in range(1, 5)]
    start = Noise(made)
    torch.manual_seed(made.train.seed)
    average = {
        name: part.double() for name, part in start.new_model(DiTFields(**made.model.config)).state_dict().items()
    }
    for step in steps:
        average = {name: 0.7 * part + 0.3 * step[name].double() for name, part in average.items()}
    result = weights(made)
    assert result.keys() == average.keys()
    for name, part in result.items():
        torch.testing.assert_close(part.double(), average[name], rtol=0, atol=1e-6)
        if EMBEDDING in name:
            assert torch.equal(part, result[f"transformer_blocks.0{EMBEDDING}{name.partition(EMBEDDING)[2]}"])


@pytest.mark.slow
def test_losses_do_not_depend_on_micro_batch_size(tmp_path: Path) -> None:
    results = []
    for at_once in (1, 4):
        made = recipe(tmp_path / str(at_once), micro_batch=at_once, learning_rate=1e-3)
        train(made)
        results.append(losses(made))
    assert results[0] == pytest.approx(results[1], abs=2e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_have_losses_of_one(tmp_path: Path) -> None:
    made = recipe(tmp_path, learning_rate=1e-3)
    train(made)
    run = Run(made, tmp_path, "two")
    run.finish(2, "train.micro_batch=1")
    assert list(run.losses().values()) == pytest.approx(losses(made), abs=2e-5)


@pytest.mark.slow
def test_losses_with_checkpointed_activations_and_bfloat16(tmp_path: Path) -> None:
    results = []
    for name, options in {
        "plain": {},
        "saving": {"checkpoint_activations": True},
        "half": {"dtype": "bfloat16"},
    }.items():
        made = recipe(tmp_path / name, *PIXELS, steps=2, learning_rate=1e-3, **options)
        train(made)
        results.append(losses(made))
    assert results[1] == pytest.approx(results[0], abs=1e-6)
    assert results[2] == pytest.approx(results[0], abs=0.03) and results[2] != results[0]


def test_samples_have_expected_noise_timesteps_labels_and_flips(tmp_path: Path) -> None:
    made = recipe(tmp_path, *PIXELS)
    _, data = objective_and_data(made)
    samples, again = (list(data.samples(600, 0)) for _ in range(2))
    for sample, other in zip(samples[::50], again[::50], strict=True):
        assert all(torch.equal(part, other[name]) for name, part in sample.items())
    assert not torch.equal(samples[0]["noise"], data.samples(600, 1)[0]["noise"])
    times = torch.stack([sample["timesteps"] for sample in samples]).float()
    assert times.mean() == pytest.approx(499.5, abs=50) and times.max() > 980 and times.min() < 20
    hidden = sum(sample["labels"].item() == 4 for sample in samples) / len(samples)
    assert 0.06 < hidden < 0.14
    noise = torch.stack([sample["noise"] for sample in samples])
    assert noise.mean().abs() < 0.02 and noise.std() == pytest.approx(1, abs=0.02)
    pixels = torch.stack([sample["pixel_values"] for sample in samples])
    assert pixels.shape == (600, 1, 8, 8) and pixels.min() >= -1 and pixels.max() <= 1
    unlike = {tuple(image.flatten().tolist()) for image in pixels}
    images = sum(len(source) for source in data.sources)
    assert len(unlike) == 2 * images  # each image and its mirror image
    assert all(sample["labels"] < 4 for sample in data.evaluation)
    _, plain = objective_and_data(replace(made, objective=replace(made.objective, flip=False)))
    assert len({tuple(s["pixel_values"].flatten().tolist()) for s in plain.samples(600, 0)}) == images


def test_latents_equal_scaled_vae_encoding(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    objective, data = objective_and_data(made)
    batch = {name: torch.stack([sample[name] for sample in data.samples(3, 0)]) for name in data.samples(1, 0)[0]}
    assert batch["pixel_values"].shape == (3, 3, 16, 16) and batch["noise"].shape == (3, 4, 8, 8)
    vae = AutoencoderKL.from_pretrained(made.model.vae)
    with torch.no_grad():
        mean, log_variance = vae.quant_conv(vae.encoder(batch["pixel_values"])).chunk(2, dim=1)
    expected = 0.18215 * (mean + (log_variance / 2).exp() * batch["latent_noise"])
    torch.testing.assert_close(objective._clean(batch), expected)
    assert not torch.equal(batch["latent_noise"], batch["noise"])


def test_trained_model_works_in_dit_pipeline(tmp_path: Path) -> None:
    made = recipe(tmp_path, steps=1)
    train(made)
    folder = Path(made.output, "model")
    config = json.loads((folder / "scheduler_config.json").read_text())
    assert (config["variance_type"], config["clip_sample"], config["num_train_timesteps"]) == (
        "learned_range",
        False,
        1000,
    )
    transformer = CrossheadDiTTransformer2DModel.from_pretrained(folder).eval()
    vae = AutoencoderKL.from_pretrained(made.model.vae)
    pipeline = DiTPipeline(transformer, vae, DDIMScheduler.from_pretrained(folder))
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline([2], guidance_scale=1.0, num_inference_steps=2, output_type="np").images
    assert image.shape == (16, 16, 3)


WRONG = {
    "model.path=somewhere": "model: .*path",
    "model.config.sizes=8": "'sizes'",
    "model.config.out_channels=5": "out_channels=5",
    "model.config.patch_size=3": "patch_size=3",
    "model.config.num_layers=0": "num_layers=0",
    "model.config.attention_head_dim=7": "attention_head_dim=7",
    "model.config.dropout=2": "dropout=2",
    "model.config.mixers={mixture: {active_heads: 9}}": "active_heads=9",
    "model.config.mixers={mixtures: {}}": "mixtures",
    "objective.flips=true": "flips",
    "train.tokens=100": "train.tokens=100",
    "train.samples=null": "samples",
    "distillation={teacher: a}": "distillation",
    "hub={repo: me/mine}": "hub",
    "data.sources.0.kind=text": "kind='text'",
    "data.separate_documents=true": "data.separate_documents",
}


@pytest.mark.parametrize("change", WRONG)
def test_invalid_diffusion_recipes_are_refused(change: str) -> None:
    with pytest.raises(RecipeError, match=WRONG[change]):
        load_recipe(LATENTS, [change])


def test_vae_without_noise_objective_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.vae=somewhere"):
        load_recipe("small/smollm2_knocking", ["model.vae=somewhere"])


WRONG_RUNS = {
    "num_embeds_ada_norm": (PIXELS, {"num_embeds_ada_norm": 5}, "num_embeds_ada_norm=5.*4 classes"),
    "in_channels": (PIXELS, {"in_channels": 2, "out_channels": 2}, r"in_channels=2.*1 or 3"),
    "latents": ((), {"in_channels": 3, "out_channels": 6}, r"model\.vae=.*4 latent channels.*in_channels=3"),
    "mixers": (PIXELS, {"mixers": {"talking": {}}}, "talking"),
}


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_model_config_that_does_not_fit_data_is_refused(name: str, tmp_path: Path) -> None:
    changes, config, message = WRONG_RUNS[name]
    made = recipe(tmp_path, *changes)
    made = replace(made, model=replace(made.model, config=made.model.config | config))
    with pytest.raises(RecipeError, match=message):
        train(made)
    assert not Path(made.output).exists()


@pytest.mark.parametrize("kind", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharded_diffusion_runs_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    initialise = Trainer.__init__

    def sharded(self: Any, **options: Any) -> None:
        initialise(self, **options)
        setattr(self, kind, True)

    monkeypatch.setattr(Trainer, "__init__", sharded)
    with pytest.raises(RecipeError, match=r"noise.*FSDP or DeepSpeed"):
        train(recipe(tmp_path, *PIXELS, average=None))


def test_missing_vae_is_refused(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"model\.vae=/nowhere/vae"):
        train(replace(made, model=replace(made.model, vae="/nowhere/vae")))
