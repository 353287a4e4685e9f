"""Mechanisms have a learning rate and a weight decay of their own; without settings they do not decay."""

from dataclasses import replace

import pytest
import torch
from transformers import Trainer

from crosshead.common.errors import RecipeError
from crosshead.recipes.estimate.dry_run import dry_run, dry_run_lines
from crosshead.recipes.estimate.memory import ONE_GPU
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.sections import LoraOptions, MechanismOptions, TrainOptions
from crosshead.recipes.sweep.sweep import sweep_runs
from crosshead.recipes.trainer.callbacks import StopOnSignal
from crosshead.recipes.trainer.parameters import is_mechanism, separate_mechanisms
from tiers import grid
from toy_training import LORA, losses, resumed, toy_run, train, weights
from toys import CASES, MECHANISM_CASES, mixed_model

TRAINABLE = {
    "mixers+lora": {"trainable": "mixers+lora", "lora": LoraOptions(2, 4.0)},
    "all": {"trainable": "all", "lora": None},
    "mixers": {"trainable": "mixers", "lora": None},
}
OWN = MechanismOptions(learning_rate=2e-3, weight_decay=0.3)


@pytest.mark.parametrize(("trainable", "own"), grid(TRAINABLE, [None, OWN], strength=1))
def test_mechanisms_have_own_learning_rate_and_weight_decay(trainable, own, tmp_path, monkeypatch):
    settings_of = {}

    def record(self, args, state, control, model=None, optimizer=None, **_):
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            assert group["params"]
            for parameter in group["params"]:
                settings_of[names[parameter]] = (group["initial_lr"], group["weight_decay"])

    monkeypatch.setattr(StopOnSignal, "on_optimizer_step", record)
    options = TRAINABLE[trainable] | {"learning_rate": 1e-3, "weight_decay": 0.1}
    options |= {} if own is None else {"mechanisms": own}
    train(toy_run(LORA, tmp_path, steps=2, train=options))
    expected = (1e-3, 0.0) if own is None else (2e-3, 0.3)
    mechanisms = {name: settings for name, settings in settings_of.items() if is_mechanism(name)}
    assert mechanisms and set(mechanisms.values()) == {expected}
    others = {settings for name, settings in settings_of.items() if not is_mechanism(name)}
    assert others == {"all": {(1e-3, 0.1), (1e-3, 0.0)}, "mixers": set(), "mixers+lora": {(1e-3, 0.1)}}[trainable]


@pytest.mark.parametrize("mechanism", MECHANISM_CASES)
def test_mechanisms_do_not_decay_without_gradient(mechanism):
    """Mechanisms stay equal to the bit, while all other matrices decay."""
    model = mixed_model("Llama", CASES[mechanism])
    options = TrainOptions(learning_rate=0.1, tokens=64, batch_tokens=64, weight_decay=0.1)
    decaying = [name for name, part in model.named_parameters() if part.ndim == 2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    separate_mechanisms(optimizer, model, decaying, options)
    before = {name: part.detach().clone() for name, part in model.named_parameters()}
    for part in model.parameters():
        part.grad = torch.zeros_like(part)
    optimizer.step()
    same = {name for name, part in model.named_parameters() if torch.equal(part, before[name])}
    assert {name for name in before if is_mechanism(name)} == {name for name in same if is_mechanism(name)}
    assert not same & {name for name in decaying if not is_mechanism(name)}


def test_norms_of_mechanisms_have_no_weight_decay():
    """The norm of `explicit` has no weight decay, like other norms."""
    model = mixed_model("Llama", {"explicit": {"norm": True}})
    options = TrainOptions(learning_rate=0.1, tokens=64, batch_tokens=64, mechanisms=OWN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    decaying = Trainer.get_decay_parameter_names(None, model)
    separate_mechanisms(optimizer, model, decaying, options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    assert {names[part] for part in parts} == set(names.values()) and len(parts) == len(names)
    decays = {names[part]: group["weight_decay"] for group in optimizer.param_groups for part in group["params"]}
    mechanisms = {name: decay for name, decay in decays.items() if is_mechanism(name)}
    assert mechanisms == {name: 0.0 if "norm" in name else 0.3 for name in mechanisms}
    assert set(mechanisms.values()) == {0.0, 0.3}


@pytest.mark.slow
def test_resumed_run_with_mechanism_options_is_bitwise_equal(tmp_path):
    recipe = toy_run(LORA, tmp_path, train=TRAINABLE["all"] | {"mechanisms": OWN})
    whole, again = (replace(recipe, output=str(tmp_path / name)) for name in ("whole", "again"))
    train(whole)
    resumed(again, 3)
    assert losses(again) == losses(whole)
    assert all(torch.equal(part, weights(whole)[name]) for name, part in weights(again).items())


def test_mechanism_options_in_recipes(tmp_path):
    name = "small/smollm2_talking"
    assert load_recipe(name).train.mechanisms == MechanismOptions(None, 0.0)
    changed = load_recipe(name, ["train.mechanisms={learning_rate: 2e-3, weight_decay: 0.3}"])
    assert changed.train.mechanisms == OWN and changed.train.mechanism_rate == 2e-3
    for change, words in (
        ("train.mechanisms.weight_decay=-1", r"train\.mechanisms\.weight_decay='-1'"),
        ("train.mechanisms.learning_rate=0", r"train\.mechanisms\.learning_rate='0'"),
        ("train.mechanisms.rate=1", r"train\.mechanisms has no key 'rate'"),
    ):
        with pytest.raises(RecipeError, match=words):
            load_recipe(name, [change])


def test_sweep_keeps_learning_rate_of_mechanisms():
    own = "train.mechanisms.learning_rate=2e-3"
    name = "papers/mea_1b_sweep"
    assert [run.train.mechanism_rate for run in sweep_runs(load_recipe(name))] == [1e-4, 5e-4, 1e-3, 3e-3]
    assert {run.train.mechanism_rate for run in sweep_runs(load_recipe(name, [own]))} == {2e-3}
    with pytest.raises(RecipeError, match=r"train\.mechanisms\.learning_rate=0\.002"):
        sweep_runs(load_recipe(name, [own, "train.trainable=mixers"]))


def test_dry_run_reports_both_optimizer_groups():
    few = "model.config.num_hidden_layers=2"
    report = dry_run(load_recipe("small/smollm2_explicit", [few, "train.mechanisms.learning_rate=2e-3"]), ONE_GPU)
    stock, own = report["optimizer"]["model"], report["optimizer"]["mechanisms"]
    assert (stock["learning_rate"], stock["weight_decay"]) == (6.5e-4, 0.1)
    assert (own["learning_rate"], own["weight_decay"]) == (2e-3, 0.0)
    assert own["parameters"] == report["new_parameters"]
    assert own["parameters"] + stock["parameters"] == report["trainable_parameters"]
    assert any("mechanisms" in line and "0.002" in line for line in dry_run_lines(report))
    alone = dry_run(load_recipe("small/smollm2_explicit", [few, "train.trainable=mixers"]), ONE_GPU)
    assert list(alone["optimizer"]) == ["mechanisms"]
