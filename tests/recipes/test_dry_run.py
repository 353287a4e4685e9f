"""`crosshead train --dry-run`: the figures of a run, from configurations alone."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from broken import run
from crosshead.common.errors import RecipeError
from crosshead.evals.cost.model import model_cost
from crosshead.recipes.estimate.dry_run import dry_run, dry_run_lines
from crosshead.recipes.estimate.memory import FSDP, ONE_GPU, Sharding, read_sharding
from crosshead.recipes.schema.model_config import model_config
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import toy
from crosshead.recipes.trainer.loading import load_tokenizer
from crosshead.recipes.trainer.models import load_model
from crosshead.recipes.trainer.parameters import is_mechanism, set_trainable
from tiers import grid

ACCELERATE = Path(__file__).parents[2] / "recipes" / "accelerate"
SMALL = "small/smollm2_explicit"
FEW = "model.config.num_hidden_layers=3"


@pytest.fixture
def run_cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


@pytest.mark.parametrize(
    ("name", "changes"),
    grid(
        ["papers/kha_moe_a0.8b_6.6b", "papers/mea_1b", "small/smollm2_mixture"],
        [[], ["train.dtype=bfloat16"]],
        strength=1,
    ),
)
def test_dry_run_figures_equal_trained_model(name, changes, tmp_path):
    recipe = toy(load_recipe(name, changes), tmp_path)
    report = dry_run(recipe, ONE_GPU)
    model = set_trainable(load_model(recipe, load_tokenizer(recipe)), recipe.train)
    sizes = {key: part.numel() for key, part in model.named_parameters()}
    assert report["parameters"] == report["trainable_parameters"] == sum(sizes.values())
    assert report["new_parameters"] == sum(size for key, size in sizes.items() if is_mechanism(key))
    assert (report["sequences_per_step"], report["tokens_per_step"], report["steps"]) == (4, 256, 6)
    assert report["micro_batches_per_step"] == 2
    flops = model_cost(model.config, recipe.data.length).training_flops
    assert report["training_flops_per_token"] == flops and report["training_flops"] == flops * 6 * 256
    assert report["counted_from"] == ("model.config" if recipe.model.path is None else "config.json")


def test_dry_run_of_large_recipe_needs_no_weights():
    report = dry_run(load_recipe(SMALL), ONE_GPU)
    assert report["parameters"] == 132_303_528 and report["new_parameters"] == 30 * 2 * 3 * 2
    assert report["steps"] == 306 and report["micro_batches_per_step"] == 8
    assert report["kv_bytes_per_token"] == 30 * (2 + 2) * 64 * 2
    memory = report["memory_per_gpu"]
    assert memory["weights"] == memory["gradients"] == memory["moments"] / 2 == 4 * 132_303_528
    assert memory["total"] == sum(memory.values()) / 2
    text = "\n".join(dry_run_lines(report))
    assert "models/smollm2_explicit" in text
    assert "  crosshead convert HuggingFaceTB/SmolLM2-135M" in text
    assert "teacher" in text and "Activations" in text


def test_dry_run_counts_lora_parameters_and_refuses_fsdp2():
    changes = [FEW, "train.trainable=mixers+lora", "train.lora={rank: 16, alpha: 32}"]
    report = dry_run(load_recipe(SMALL, changes), ONE_GPU)
    rows, wide, narrow = 576, 1536, 128
    per_layer = 16 * (2 * rows + 2 * (rows + narrow) + 2 * rows + 3 * (rows + wide))
    assert report["trainable_parameters"] == 3 * per_layer + report["new_parameters"]
    with pytest.raises(RecipeError, match=r"mixers\+lora.*FSDP2"):
        dry_run(load_recipe(SMALL, changes), Sharding("fsdp2", FSDP, 8))


def test_dry_run_reads_stored_config_but_not_weights(tmp_path):
    recipe = load_recipe(SMALL, [FEW])
    config = model_config(recipe.model.config)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing")
    change = f"model.path={tmp_path / 'model'}"
    report = dry_run(load_recipe(SMALL, [FEW, change]), ONE_GPU)
    assert report["counted_from"] == "config.json" and report["convert"] is None
    assert report["new_parameters"] == 3 * 2 * 3 * 2
    assert not any(str(report["model"]) in text for text in dry_run_lines(report))
    with pytest.raises(RecipeError, match=r"model\.path.*num_hidden_layers=3.*30"):
        dry_run(load_recipe(SMALL, [change]), ONE_GPU)
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"model\.path="):
        dry_run(load_recipe(SMALL, [FEW, change]), ONE_GPU)


def test_local_teacher_memory_is_counted_from_its_config(tmp_path):
    recipe = load_recipe(SMALL, [FEW])
    config = model_config(recipe.model.config | {"num_hidden_layers": 2, "mixers": {}})
    config.dtype = torch.float32
    config.save_pretrained(tmp_path / "teacher")
    report = dry_run(load_recipe(SMALL, [FEW, f"distillation.teacher={tmp_path / 'teacher'}"]), ONE_GPU)
    assert report["memory_per_gpu"]["teacher"] == 4 * parameter_count(config)
    config.num_hidden_layers = 3
    assert dry_run(recipe, ONE_GPU)["memory_per_gpu"]["teacher"] == 2 * parameter_count(config)


def test_teacher_with_zero3_is_refused():
    with pytest.raises(RecipeError, match=r"distillation\.teacher.*ZeRO-3.*distillation\.logits"):
        dry_run(load_recipe(SMALL, [FEW]), read_sharding("deepspeed_zero3_8_gpus"))


def parameter_count(config):
    with torch.device("meta"):
        return sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())


def test_shipped_accelerate_files_give_their_sharding():
    kinds = {path.stem: read_sharding(path.stem) for path in ACCELERATE.glob("*.yaml")}
    assert {name: (sharding.kind, sharding.processes) for name, sharding in kinds.items()} == {
        "one_gpu": ("one GPU", 1),
        "fsdp2_8_gpus": ("FSDP2", 8),
        "fsdp2_many_machines": ("FSDP2", 32),
        "deepspeed_zero3_8_gpus": ("DeepSpeed ZeRO-3", 8),
    }
    assert kinds["one_gpu"] == ONE_GPU
    assert read_sharding(str(ACCELERATE / "fsdp2_8_gpus.yaml")) == kinds["fsdp2_8_gpus"]


BAD_FILES = {
    "no file": (None, "deepspeed_zero3_8_gpus, fsdp2_8_gpus, fsdp2_many_machines, one_gpu"),
    "no YAML": ("a: [", "file.yaml"),
    "no mapping": ("- a", "file.yaml"),
    "another kind": ("distributed_type: TPU", "distributed_type='TPU'"),
    "no number": ("distributed_type: MULTI_GPU", "num_processes=None"),
    "the first FSDP": ("distributed_type: FSDP\nnum_processes: 8", "fsdp_config.fsdp_version=1"),
    "weights elsewhere": (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}",
        "fsdp_config.fsdp_offload_params=True",
    ),
    "a list": ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: [a]", "fsdp_config=['a']"),
    "no count": ("distributed_type: MULTI_GPU\nnum_processes: true", "num_processes=True"),
    "another stage": ("distributed_type: DEEPSPEED\nnum_processes: 8", "deepspeed_config.zero_stage=2"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_unsupported_accelerate_files_are_refused(case, tmp_path):
    content, message = BAD_FILES[case]
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError) as caught:
        read_sharding(str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_multi_gpu_counts_full_weights_on_each_gpu(tmp_path):
    path = tmp_path / "copies.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 4}))
    report = dry_run(load_recipe(SMALL, [FEW]), read_sharding(str(path)))
    assert report["micro_batches_per_step"] == 2 and report["processes"] == 4
    assert report["memory_per_gpu"]["weights"] == 4 * report["parameters"]


def test_dry_run_command_prints_report_and_writes_nothing(run_cli, tmp_path):
    status, out, err = run_cli(f"train {SMALL} --set {FEW} --dry-run --json --accelerate fsdp2_8_gpus")
    assert (status, err) == (0, "")
    assert json.loads(out) == dry_run(load_recipe(SMALL, [FEW]), read_sharding("fsdp2_8_gpus"))
    status, out, err = run_cli(f"train {SMALL} --set {FEW} --dry-run")
    assert (status, err) == (0, "")
    assert ["steps", "306"] in [text.split() for text in out.splitlines()]
    assert "one_gpu" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (f"train {SMALL} --json", 2, "--dry-run"),
        (f"train {SMALL} --accelerate one_gpu", 2, "--dry-run"),
        (f"train {SMALL} --dry-run --accelerate none", 1, "--accelerate none"),
        (
            f"train {SMALL} --dry-run --set {FEW} --set train.micro_batch=16 --accelerate fsdp2_8_gpus",
            1,
            "8 processes",
        ),
    ],
)
def test_dry_run_command_refuses_wrong_options(run_cli, command, status, words):
    exit_status, out, err = run_cli(command)
    assert (exit_status, out) == (status, "")
    assert words in err and "Traceback" not in err
