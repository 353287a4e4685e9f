"""The estimate of activation memory, against the tensors that autograd saves in a real forward pass."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

import toys
from crosshead.recipes.estimate.activations import Precision, activations
from crosshead.recipes.schema.recipe import Recipe
from crosshead.recipes.schema.sections import DataOptions, DataSource, LoraOptions, ModelOptions, TrainOptions
from crosshead.recipes.trainer.parameters import set_trainable
from tiers import grid

LENGTH = 40
DATA = DataOptions((DataSource("text.txt"),), length=LENGTH)
WIDE = Precision(torch.float32, autocast=False)
ARITHMETIC = {
    "float32": WIDE,
    "autocast": Precision(torch.float32, autocast=True),
    "bfloat16": Precision(torch.bfloat16, autocast=False),
    "both": Precision(torch.bfloat16, autocast=True),
}


def config_of(backbone, mixers):
    """Return a config whose widths are no multiples of those that the estimate measures."""
    experts = {"moe_intermediate_size": 40} if backbone == "Qwen3Moe" else {}
    return toys.mixed_config(backbone, mixers, hidden_size=72, intermediate_size=104, **experts)


def train_options(trainable="all", micro_batch=3, **changes):
    lora = LoraOptions(rank=4, alpha=8.0) if trainable == "mixers+lora" else None
    return TrainOptions(1e-3, 1200, 240, micro_batch=micro_batch, trainable=trainable, lora=lora, **changes)


def estimate_of(config, train, precision, data=DATA):
    return activations(config, Recipe("run", ModelOptions("model"), data, train), precision)


def saved_bytes(config, train, precision, checkpointed=False, **inputs):
    """Return the bytes that autograd saves for one micro batch, without weights and copies of weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=precision.weights).train()
    if checkpointed:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    model = set_trainable(model, train)
    sizes = []
    for rows in (train.micro_batch, 2 * train.micro_batch):
        own = {part.untyped_storage().data_ptr() for part in model.parameters()}
        saved = {}

        def keep(tensor, own=own, saved=saved):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = tensor
            return tensor

        tokens = torch.randint(1, 61, (rows, LENGTH))
        casting = torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast)
        with casting, saved_tensors_hooks(keep, lambda tensor: tensor):
            model(
                input_ids=tokens, use_cache=False, **{name: value.expand(rows, -1) for name, value in inputs.items()}
            )
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    return sizes[1] - sizes[0]  # copies of weights cancel, since their size does not depend on the batch


@pytest.mark.parametrize(("name", "precision"), grid(toys.CASES, ["float32", "autocast"], strength=1))
def test_estimate_equals_saved_tensors_for_every_mechanism(name, precision):
    config = config_of("Llama", toys.CASES[name])
    estimate = estimate_of(config, train_options(), ARITHMETIC[precision])
    assert estimate.total(False) == pytest.approx(
        saved_bytes(config, train_options(), ARITHMETIC[precision]), rel=0.01
    )
    assert len(estimate.layers) == 2


@pytest.mark.parametrize(("backbone", "precision"), grid(["Qwen2", "Qwen3", "Qwen3Moe"], ARITHMETIC, strength=1))
def test_estimate_equals_saved_tensors_for_every_backbone(backbone, precision):
    config = config_of(backbone, toys.CASES["knocking+mixture"])
    estimate = estimate_of(config, train_options(), ARITHMETIC[precision])
    assert estimate.total(False) == pytest.approx(
        saved_bytes(config, train_options(), ARITHMETIC[precision]), rel=0.01
    )


@pytest.mark.parametrize("trainable", ["mixers", "mixers+lora"])
def test_frozen_parameters_save_fewer_activations(trainable):
    config, train = config_of("Llama", toys.CASES["knocking"]), train_options(trainable)
    estimate = estimate_of(config, train, WIDE).total(False)
    assert estimate == pytest.approx(saved_bytes(config, train, WIDE), rel=0.02)
    assert estimate < estimate_of(config, train_options(), WIDE).total(False)


@pytest.mark.parametrize(("name", "precision"), grid(["explicit", "talking"], ARITHMETIC, strength=1))
def test_checkpointed_layers_save_only_their_input(name, precision):
    config = config_of("Llama", toys.CASES[name])
    estimate = estimate_of(config, train_options(), ARITHMETIC[precision])
    real = saved_bytes(config, train_options(), ARITHMETIC[precision], checkpointed=True)
    assert estimate.total(True) - max(estimate.layers) == pytest.approx(real, rel=0.05)
    assert estimate.total(True) < estimate.total(False)


def test_batch_of_one_needs_no_expanded_copies():
    config = config_of("Llama", toys.CASES["talking"])
    config._attn_implementation = "eager"  # saves all attention weights
    one, three = (estimate_of(config, train_options(micro_batch=rows), WIDE).total(False) for rows in (1, 3))
    assert one < 0.8 * three / 3


def test_layers_with_and_without_mechanism_differ():
    config = config_of("Llama", {"talking": {"layers": [1]}})
    config._attn_implementation = "eager"  # saves all attention weights
    first, second = estimate_of(config, train_options(), WIDE).layers
    assert first < 0.8 * second


@pytest.mark.parametrize("name", ["knocking", "talking"])
def test_separate_documents_save_more_activations(name):
    config, apart = config_of("Llama", toys.CASES[name]), replace(DATA, separate_documents=True)
    positions = torch.cat([torch.arange(25), torch.arange(15)])
    estimate = estimate_of(config, train_options(), WIDE, apart).total(False)
    assert estimate == pytest.approx(saved_bytes(config, train_options(), WIDE, position_ids=positions), rel=0.02)
    assert estimate > estimate_of(config, train_options(), WIDE).total(False)


def test_estimate_keeps_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    estimate_of(config_of("Llama", {}), train_options(), WIDE)
    assert torch.equal(torch.rand(3), expected)
