"""Shipped recipes accept the checkpoints that they name, whose config.json has more fields than the recipe."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.schema.model_config import CONFIGS, model_config
from crosshead.recipes.schema.recipe import load_recipe, shipped_recipes
from crosshead.recipes.trainer.metrics import LossMonitor
from crosshead.recipes.trainer.models import check_expected
from toy_training import SCRATCH, toy_run, train, weights

FURTHER = {
    "crosshead_llama": {
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "crosshead_qwen3": {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "max_window_layers": 28,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    },
    "crosshead_qwen3_moe": {
        "bos_token_id": 151643,
        "eos_token_id": [151645, 151643],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "use_cache": True,
    },
    "crosshead_bert": {"gradient_checkpointing": False, "layer_norm_eps": 1e-12, "pad_token_id": 0},
    "crosshead_vit": {"layer_norm_eps": 1e-12, "initializer_range": 0.03},
}
"""Model type -> fields of published models of this type that the shipped recipes do not name."""


def named(recipe):
    """Whether the recipe names a model and describes it."""
    return recipe.model.path is not None and recipe.model.config is not None


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if named(load_recipe(name))])
def test_recipe_accepts_further_fields_of_its_model(name):
    recipe = load_recipe(name)
    content, expected = recipe.model.config, model_config(recipe.model.config, recipe.objective)
    kind = CONFIGS[content["model_type"]]
    check_expected(kind.from_dict({**content, **FURTHER[kind.model_type]}), expected, content)
    for key, value in (("hidden_size", 2 * content["hidden_size"]), ("mixers", {"gating": {}})):
        other = kind.from_dict({**content, key: value})
        if getattr(other, key) != getattr(expected, key):
            with pytest.raises(RecipeError, match=f"model.path has {key}="):
                check_expected(other, expected, content)


def test_model_trained_from_scratch_continues_with_its_own_recipe(tmp_path):
    """Training completes the config with the ids of the special tokens, which the recipe does not give."""
    recipe = toy_run(SCRATCH, tmp_path)
    train(recipe)
    model = replace(recipe.model, path=str(Path(recipe.output) / "model"))
    further = replace(recipe, model=model, output=str(tmp_path / "further"))
    train(further)
    assert weights(further).keys() == weights(recipe).keys()


def test_run_that_ends_with_a_high_loss_warns(tmp_path, caplog, monkeypatch):
    """A run of fewer steps than the monitor waits for is not stopped, but it says that its loss is high."""
    recipe = toy_run(SCRATCH, tmp_path)
    monkeypatch.setattr(LossMonitor, "is_high", True)
    with caplog.at_level(logging.WARNING):
        train(recipe)
    assert "the loss is far above its lowest value" in caplog.text
