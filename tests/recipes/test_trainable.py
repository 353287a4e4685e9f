"""Parameters that training changes and parameters that it leaves equal to the bit."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from crosshead.common.errors import RecipeError
from crosshead.recipes.schema.sections import LoraOptions, TrainOptions
from crosshead.recipes.trainer.parameters import PROJECTIONS, set_trainable
from tiers import grid
from toy_training import LORA, MIXTURE, metrics, toy_run, train, weights
from toys import BACKBONES, CASES, lopsided, mixed_model, stock_model, tokens

OPTIONS = {"learning_rate": 1e-3, "tokens": 64, "batch_tokens": 64}


def train_toy(trainable, tmp_path, **train_options):
    """Train; return the weights before and after, and the recipe."""
    recipe = toy_run(LORA, tmp_path, train={"trainable": trainable, **train_options})
    before = load_file(Path(recipe.model.path, "model.safetensors"))
    train(recipe)
    return before, weights(recipe), recipe


def changed_weights(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_trainable_all_changes_every_weight(tmp_path):
    before, after, _ = train_toy("all", tmp_path, lora=None)
    assert changed_weights(before, after) == set(before)


@pytest.mark.parametrize("saving", [False, True])
def test_transfer_changes_only_attention_weights(saving, tmp_path, caplog):
    """Weight decay does not change other parameters; a warning says that only the transfer was trained."""
    results, warnings = [], []
    for steps in (0, 2):
        options = {"weight_decay": 0.5, "checkpoint_activations": saving}
        distillation = {"match_steps": 0, "transfer_steps": steps}
        recipe = toy_run(MIXTURE, tmp_path / str(steps), steps=2, train=options, distillation=distillation)
        before = load_file(Path(recipe.model.path, "model.safetensors"))
        train(recipe)
        results.append(changed_weights(before, weights(recipe)))
        warnings.append("distillation.transfer_steps" in caplog.text)
    assert warnings == [False, True]
    assert results[0] == set(before)
    assert results[1] == {name for name in before if ".self_attn." in name}


def test_trainable_mixers_changes_only_mixers(tmp_path):
    before, after, recipe = train_toy("mixers", tmp_path, lora=None)
    assert changed_weights(before, after) == {name for name in before if ".mixers." in name} != set()
    assert 0 < metrics(recipe)[-2]["drift/knocking"] < 0.1


def test_trainable_mixers_and_lora_changes_mixers_and_projections(tmp_path):
    before, after, recipe = train_toy("mixers+lora", tmp_path, lora=LoraOptions(2, 4.0))
    assert changed_weights(before, after) == {
        name for name in before if ".mixers." in name or name.split(".")[-2] in PROJECTIONS
    }
    change = after["model.layers.0.self_attn.q_proj.weight"] - before["model.layers.0.self_attn.q_proj.weight"]
    assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2
    # The saved model needs no peft: the adapters are merged, and its class is crosshead's.
    assert not list(Path(recipe.output, "model").glob("adapter*"))
    assert type(AutoModelForCausalLM.from_pretrained(Path(recipe.output, "model"))).__module__.startswith("crosshead")
    assert 0 < metrics(recipe)[-2]["drift/knocking"] < 0.1


@pytest.mark.filterwarnings("error::FutureWarning")  # peft reads a deprecated attribute
def test_lora_beside_mechanism_without_parameters():
    lora = LoraOptions(2, 4.0)
    options = {"active_heads": 3, "shared_heads": 1, "router": "query_norm", "gate": "binary"}
    routed = mixed_model("Llama", {"mixture": options})
    assert not any(".mixers." in name for name, _ in routed.named_parameters())
    model = set_trainable(routed, TrainOptions(**OPTIONS, trainable="mixers+lora", lora=lora))
    assert any(parameter.requires_grad for parameter in model.parameters())
    for trainable, lora_options in (("mixers", None), ("mixers+lora", lora)):
        stock = mixed_model("Llama", {})
        for wrong in (stock,) if lora_options else (stock, mixed_model("Llama", {"mixture": options})):
            with pytest.raises(RecipeError, match=f"train.trainable='{re.escape(trainable)}'"):
                set_trainable(wrong, TrainOptions(**OPTIONS, trainable=trainable, lora=lora_options))


@pytest.mark.parametrize("backbone", ["DeepseekV2", "DeepseekV3"])
def test_lora_adapts_every_projection_of_mla(backbone):
    model = mixed_model(backbone, {"knocking": {}})
    linear = {name for name, module in model.named_modules() if ".self_attn." in name and type(module) is nn.Linear}
    expected = {name for name in linear if ".mixers." not in name}
    wrapped = set_trainable(model, TrainOptions(**OPTIONS, trainable="mixers+lora", lora=LoraOptions(2, 4.0)))
    adapted = {name.removeprefix("base_model.model.") for name, _ in wrapped.named_parameters() if ".lora_A." in name}
    assert expected and {name.partition(".lora_A.")[0] for name in adapted if ".self_attn." in name} == expected


@pytest.mark.parametrize(("backbone", "case"), grid(BACKBONES, CASES, strength=1))
def test_every_mechanism_is_trainable_beside_lora_and_merges(case, backbone):
    torch.manual_seed(0)
    model = mixed_model(backbone, CASES[case])
    ids, names = tokens(), dict(model.named_parameters())
    expected = model(ids).logits
    wrapped = set_trainable(model, TrainOptions(**OPTIONS, trainable="mixers+lora", lora=LoraOptions(2, 4.0)))
    torch.testing.assert_close(wrapped(ids).logits, expected)
    free = {name.replace(".modules_to_save.default", "") for name, p in wrapped.named_parameters() if p.requires_grad}
    free = {name.removeprefix("base_model.model.") for name in free if "lora" not in name}
    assert free == {name for name in names if ".mixers." in name}
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.ones_like(parameter))
    changed = wrapped(ids).logits
    assert not torch.allclose(changed, expected)
    whole = wrapped.merge_and_unload()
    assert dict(whole.named_parameters()).keys() == names.keys()
    torch.testing.assert_close(whole(ids).logits, changed, rtol=1e-4, atol=1e-4)


def test_trainable_mixers_without_mixers_is_refused():
    for model in (stock_model("Llama"), lopsided(mixed_model("Llama", {}))):
        with pytest.raises(RecipeError, match=r"train\.trainable='mixers'"):
            set_trainable(model, TrainOptions(**OPTIONS, trainable="mixers"))
