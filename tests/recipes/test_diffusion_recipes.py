"""Recipes of diffusion transformers: the paper's settings, dry runs, wrong values, cards and the zoo."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from diffusers import DiTTransformer2DModel

from broken import run as run_command
from crosshead.common.errors import RecipeError
from crosshead.recipes.estimate.dry_run import dry_run, dry_run_lines
from crosshead.recipes.estimate.memory import FSDP, ONE_GPU, ZERO3, Sharding
from crosshead.recipes.schema.dit_config import DiTFields
from crosshead.recipes.schema.recipe import load_recipe, shipped_recipes
from crosshead.recipes.train import train
from crosshead.recipes.trainer.noise_objective import Noise
from toy_diffusion import PIXELS, recipe

PAPER = "papers/moh_dit_xl_2"


def test_moh_dit_recipe_has_paper_settings() -> None:
    """Settings of Mixture-of-Head, section 4.2 and table 2."""
    loaded = load_recipe(PAPER)
    config, options = loaded.model.config or {}, loaded.train
    assert (loaded.steps, loaded.batch_size) == (7_000_000, 256)
    assert (options.learning_rate, options.schedule, options.warmup) == (1e-4, "constant", 0)
    assert (options.weight_decay, options.mechanisms.weight_decay, options.average) == (0, 0, 0.9999)
    assert loaded.objective.name == "noise" and vars(loaded.objective)["flip"]
    heads = config["mixers"]["mixture"]["active_heads"]
    assert heads == sorted(heads) and len(heads) == config["num_layers"] == 28  # fewer in the shallow layers
    assert sum(heads) / (28 * 16) == pytest.approx(0.9, abs=0.005)
    assert config["mixers"]["mixture"]["balance_weight"] == 0.01
    text = shipped_recipes()[PAPER].read_text(encoding="utf-8")
    for key in ("gradient_clipping: 0", "betas", "dtype: float32"):
        (line,) = [line for line in text.splitlines() if key in line]
        assert "not given in the paper" in line
    assert "The paper gives no numbers of heads" in text
    assert config["mixers"]["mixture"]["shared_heads"] > 0.4 * max(heads)  # section 4.5


def test_dit_field_defaults_equal_diffusers() -> None:
    stock = DiTTransformer2DModel(num_attention_heads=1, attention_head_dim=4, num_layers=1).config
    for name, field in DiTFields.__dataclass_fields__.items():
        if name not in ("mixers", "num_attention_heads", "attention_head_dim", "num_layers"):
            assert stock[name] == field.default, name


def test_dry_run_counts_equal_trained_dit(tmp_path: Path) -> None:
    made = recipe(tmp_path, *PIXELS)
    report = dry_run(made, ONE_GPU)
    model = Noise(made).new_model(DiTFields(**made.model.config or {}))
    sizes = {name: part.numel() for name, part in model.named_parameters()}
    assert report["parameters"] == report["trainable_parameters"] == sum(sizes.values())
    assert report["new_parameters"] == sum(size for name, size in sizes.items() if ".mixers." in name)
    assert (report["samples_per_step"], report["samples"], report["micro_batches_per_step"]) == (4, 16, 2)
    memory = report["memory_per_gpu"]
    assert memory["weights"] == memory["gradients"] == memory["average"] == memory["moments"] // 2
    assert memory["weights"] == 4 * report["parameters"] and memory["total"] == 5 * memory["weights"]
    paper = dry_run(load_recipe("papers/moh_dit_xl_2"), ONE_GPU)
    positions = 256 * 16 * 72
    assert round((paper["parameters"] + positions) / 1e6) == 676  # MoH, table 2
    # DiT's table 4 counts 118.64 billion multiplications per image.
    assert paper["training_flops_per_sample"] == pytest.approx(6 * 118.64e9, rel=0.01)
    assert any("FLOPs a sample" in line for line in dry_run_lines(report))
    for kind in (FSDP, ZERO3):
        with pytest.raises(RecipeError, match=rf"noise.*{kind}"):
            dry_run(replace(made, train=replace(made.train, average=None)), Sharding("eight", kind, 8))


def test_card_example_runs_and_push_and_cost_commands_work(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    made = recipe(tmp_path, *PIXELS, steps=1)
    train(made)
    folder = Path(made.output, "model")
    assert run_command(capfd, monkeypatch, f"card {folder}")[0] == 0
    text = (folder / "README.md").read_text()
    assert "library_name: diffusers" in text and "A `dit` diffusion transformer with Mixture" in text
    assert "for latents of 16 tokens" in text and "DDPMScheduler.from_pretrained" in text
    example = text.partition("```python\n")[2].partition("```")[0].replace('"run"', f'"{folder}"')
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    namespace: dict[str, Any] = {}
    exec(compile(example.replace("schedule.timesteps", "schedule.timesteps[:2]"), "card", "exec"), namespace)
    assert namespace["sample"].shape == (1, 1, 8, 8)
    status, _, err = run_command(capfd, monkeypatch, f"push {folder} me/mine --dry-run")
    assert status == 1 and "hf upload" in err and err.count("\n") == 1
    status, out, err = run_command(capfd, monkeypatch, f"cost {folder} --json")
    assert status == 0, err
    assert json.loads(out)["length"] == 16
