"""Weight decay and the learning rate of mechanisms are apart from those of the other parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crosshead.recipes.errors import RecipeError
from crosshead.recipes.load_recipe import load_recipe
from crosshead.recipes.schema import LoraOptions, MechanismOptions, TrainOptions
from crosshead.recipes.trainable import separate_mechanisms, set_trainable
from toy_training import KNOCKING, toy_run, train, weights
from toys import CASES, mixed_model

STILL = {"learning_rate": 1e-12, "weight_decay": 0.5, "schedule": "constant", "warmup": 0.0}


def options(**changes):
    return TrainOptions(**({"learning_rate": 1e-3, "tokens": 64, "batch_tokens": 64, "weight_decay": 0.1} | changes))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lora", [None, LoraOptions(2, 4.0)])
def test_every_parameter_is_in_one_group(case, lora):
    found = options(lora=lora, trainable="mixers+lora" if lora else "all")
    model = set_trainable(mixed_model("Llama", CASES[case]), found)
    moving = {name: part for name, part in model.named_parameters() if part.requires_grad}
    optimizer = torch.optim.AdamW(moving.values(), lr=found.learning_rate, weight_decay=found.weight_decay)
    separate_mechanisms(optimizer, model, found)
    grouped = [(id(part), group["weight_decay"]) for group in optimizer.param_groups for part in group["params"]]
    expected = {id(part): 0.0 if ".mixers." in name else 0.1 for name, part in moving.items()}
    assert len(grouped) == len(expected) and dict(grouped) == expected


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_mechanisms_decay_only_if_the_recipe_says_so(decay, tmp_path):
    """The rates are such that decay alone moves a weight."""
    mechanisms = MechanismOptions(learning_rate=1e-2, weight_decay=decay)
    recipe = toy_run(KNOCKING, tmp_path, 2, train=STILL | {"eps": 1e6, "mechanisms": mechanisms})
    before = load_file(Path(recipe.model.path, "model.safetensors"))
    train(recipe)
    for name, part in weights(recipe).items():
        factor = (1 - 1e-2 * decay) ** 2 if ".mixers." in name else 1.0
        torch.testing.assert_close(part, factor * before[name], rtol=1e-5, atol=1e-5)


def test_mechanisms_may_learn_faster(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, 2, train=STILL | {"mechanisms": MechanismOptions(learning_rate=1e-2)})
    before = load_file(Path(recipe.model.path, "model.safetensors"))
    train(recipe)
    moved = {name: float((part - before[name]).abs().max()) for name, part in weights(recipe).items()}
    assert all((change > 1e-3) is (".mixers." in name) for name, change in moved.items())


@pytest.mark.parametrize("change", ["weight_decay=-1", "weight_decai=0", "learning_rate=0"])
def test_a_wrong_setting_is_named(change):
    with pytest.raises(RecipeError, match=rf"mechanisms.*{change.partition('=')[0]}"):
        load_recipe(KNOCKING, [f"train.mechanisms.{change}"])
