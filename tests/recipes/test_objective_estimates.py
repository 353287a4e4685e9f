"""Dry runs of encoders and T5 against real models: parameters, FLOPs, and tensors saved by autograd."""

import json

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from crosshead.recipes.estimate.dry_run import dry_run, dry_run_lines
from crosshead.recipes.estimate.memory import ONE_GPU
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.trainer.models import load_model
from crosshead.recipes.trainer.objectives import objective_of
from encoder_toys import write_encoder
from image_toys import write_image_model
from tiers import first
from toy_training import toy_run

WIDER = {
    "papers/talking_albert_base": ["hidden_size=96", "embedding_size=24", "intermediate_size=80"],
    "small/bert_mixture": ["hidden_size=96", "intermediate_size=80"],
    "small/t5_talking": ["d_model=72", "d_ff=104"],
}
"""Recipe -> widths that are no multiples of those that the estimate measures."""


def saved_bytes(model, inputs):
    """Return the bytes that autograd saves in a forward pass, without the weights."""
    own = {part.untyped_storage().data_ptr() for part in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("name", first(["small/t5_talking", "small/bert_mixture", "papers/talking_albert_base"], 2))
def test_dry_run_figures_equal_trained_model(name, tmp_path):
    recipe = toy_run(name, tmp_path, model={"path": None})
    config = dict(recipe.model.config)
    for change in WIDER[name]:
        key, value = change.split("=")
        config[key] = int(value)
    recipe = toy_run(name, tmp_path, model={"path": None, "config": config})
    report, objective = dry_run(recipe, ONE_GPU), objective_of(recipe)
    tokenizer = objective.load_processor()
    model = load_model(recipe, tokenizer).train()
    data = objective.open_data(tokenizer, model.config, lambda *_: None)
    samples = data.samples(4, 0)
    rows = [{key: torch.stack([samples[row][key] for row in range(count)]) for key in samples[0]} for count in (2, 4)]
    inputs = [objective.model_inputs(each) for each in rows]
    assert report["parameters"] == report["trainable_parameters"] == sum(part.numel() for part in model.parameters())
    assert report["new_parameters"] == sum(p.numel() for key, p in model.named_parameters() if ".mixers." in key) > 0
    assert report["tokens_per_step"] == 256 and report["steps"] == 4
    real = saved_bytes(model, inputs[1]) - saved_bytes(model, inputs[0])  # two more sequences: one micro batch
    assert recipe.train.micro_batch == 2
    estimate = report["memory_per_gpu"]["activations"]
    logits = objective.logits(model.config) * 2 * 4
    assert estimate == pytest.approx(real, rel=0.03) or estimate == pytest.approx(real - logits, rel=0.03)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**{key: value[:1] if isinstance(value, torch.Tensor) else value for key, value in inputs[0].items()})
    assert report["training_flops_per_token"] == 3 * counter.get_total_flops() // recipe.data.length
    lines = list(dry_run_lines(report))
    assert any("FLOPs a token" in line for line in lines) and not any("KV cache" in line for line in lines)


@pytest.mark.parametrize(("backbone", "task"), [("Bert", "ForMaskedLM"), ("ViT", "ForImageClassification")])
def test_dry_run_counts_stock_encoders(backbone, task, tmp_path):
    if backbone == "ViT":
        folder, source, objective = write_image_model(tmp_path / "model", backbone), {"kind": "images"}, "classes"
    else:
        folder, source, objective = write_encoder(tmp_path / "model", backbone, task), {}, "masked_tokens"
    unit, length = ("samples", 1) if backbone == "ViT" else ("tokens", 16)
    content = {
        "output": "run",
        "model": {"path": str(folder)},
        "objective": {"name": objective},
        "data": {"sources": [{"path": "data"} | source], **({} if backbone == "ViT" else {"length": length})},
        "train": {"learning_rate": 1e-3, unit: 8 * length, f"batch_{unit}": 4 * length},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    report = dry_run(load_recipe(tmp_path / "recipe.yaml"), ONE_GPU)
    model = getattr(transformers, f"{backbone}{task}").from_pretrained(folder)
    assert report["parameters"] == model.num_parameters() and report["new_parameters"] == 0
    assert report["training_flops"] > 0 and report["memory_per_gpu"]["activations"] > 0
