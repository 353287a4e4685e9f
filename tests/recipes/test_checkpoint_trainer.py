"""Saving of sharded models, as far as one process can simulate it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from crosshead.recipes.trainer.checkpoint_trainer import CheckpointTrainer
from toys import CASES, mixed_model


def test_fsdp_wrapped_model_is_saved_with_its_original_class(tmp_path):
    """FSDP replaces the model's class by its own, whose source file must not be saved as the model's code."""
    model = mixed_model("Qwen3Moe", CASES["mixture"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kind = type(model)
    model.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    trainer: Any = CheckpointTrainer.__new__(CheckpointTrainer)
    trainer.model, trainer.model_wrapped, trainer._model_class = model, model, kind
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled, trainer._is_sharded = True, False, True
    trainer.args = SimpleNamespace(should_save=True)
    trainer.accelerator = SimpleNamespace(get_state_dict=lambda wrapped: dict(state))
    trainer.save_result(tmp_path / "model")
    trainer._save(str(tmp_path / "checkpoint"), dict(state))
    for folder in ("model", "checkpoint"):
        content = json.loads((tmp_path / folder / "config.json").read_text())
        assert content["auto_map"]["AutoModelForCausalLM"] == f"modeling_crosshead.{kind.__name__}"
        assert (tmp_path / folder / "modeling_crosshead.py").is_file()
        assert not (tmp_path / folder / Path(__file__).name).exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is kind
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
