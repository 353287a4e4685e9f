"""Memory estimates: weights, gradients and moments exactly as in a run or its shards; activations closely."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import distributed
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer

import toys
from crosshead.evals.cost.counting import on_meta
from crosshead.recipes.estimate.memory import COPIES, FSDP, ONE_GPU, ZERO3, Sharding, Teacher, memory
from crosshead.recipes.schema.model_config import model_config
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import toy
from crosshead.recipes.train import train
from crosshead.recipes.trainer.callbacks import StopOnSignal
from crosshead.recipes.trainer.parameters import set_trainable
from tiers import first

LORA = ["train.trainable=mixers+lora", "train.lora={rank: 4, alpha: 8}"]
TRAINABLE = {"all": [], "mixers": ["train.trainable=mixers"], "mixers+lora": LORA}


def small_recipe(folder, changes=(), **train_changes):
    """Return a toy recipe of SmolLM2 with explicit heads and one step."""
    recipe = toy(load_recipe("small/smollm2_explicit", changes), folder)
    options = replace(recipe.train, tokens=recipe.train.batch_tokens, warmup=0.0, **train_changes)
    return replace(recipe, train=options, distillation=None)


def memory_of(recipe, config, sharding=ONE_GPU, teacher=None):
    return SimpleNamespace(**memory(recipe, config, set_trainable(on_meta(config), recipe.train), sharding, teacher))


def byte_size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("trainable", first(reversed(TRAINABLE)))
def test_weights_gradients_and_moments_equal_a_real_run(trainable, tmp_path, monkeypatch):
    measured = {}

    def measure(self, args, state, control, model=None, optimizer=None, **_):
        states = optimizer.state.values()
        measured["weights"] = byte_size(model.parameters())
        measured["gradients"] = byte_size(part.grad for part in model.parameters() if part.grad is not None)
        measured["moments"] = byte_size(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))

    monkeypatch.setattr(StopOnSignal, "on_optimizer_step", measure)
    recipe = small_recipe(tmp_path, TRAINABLE[trainable])
    train(recipe)
    estimate = memory_of(recipe, model_config(recipe.model.config), ONE_GPU)
    assert {"weights": estimate.weights, "gradients": estimate.gradients, "moments": estimate.moments} == measured


@pytest.fixture
def mesh_of_eight():
    """A device mesh of eight processes, faked in this process."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", rank=0, world_size=8, store=fake.FakeStore())
    yield init_device_mesh("cpu", (8,))
    distributed.destroy_process_group()


def test_sharded_weights_equal_fsdp2_shards(mesh_of_eight, tmp_path):
    recipe = small_recipe(tmp_path, micro_batch=1)
    recipe = replace(recipe, train=replace(recipe.train, batch_tokens=8 * 64, tokens=8 * 64))
    config = toys.mixed_config("Qwen3Moe", toys.CASES["explicit"])
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh_of_eight)
    fully_shard(model, mesh=mesh_of_eight)
    estimate = memory_of(recipe, config, Sharding("fsdp2", FSDP, 8))
    assert estimate.weights == estimate.gradients == byte_size(part.to_local() for part in model.parameters())
    assert estimate.moments == 2 * estimate.weights and estimate.gradient_buckets == 0


def test_fsdp2_keeps_only_gradient_shards_with_gradient_sync(mesh_of_eight):
    """Without gradient sync after each micro batch, FSDP2 keeps whole gradients."""
    model = AutoModelForCausalLM.from_config(toys.mixed_config("Llama", toys.CASES["explicit"]))
    whole = byte_size(model.parameters())
    parts = (*model.model.layers, model)
    for part in parts:
        fully_shard(part, mesh=mesh_of_eight)
    shards = byte_size(part.to_local() for part in model.parameters())
    assert whole / 8 <= shards < whole / 4
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for shared in (True, False):
        model.set_requires_gradient_sync(shared)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients = [part.grad for part in model.parameters()]
        if shared:
            assert byte_size(gradient.to_local() for gradient in gradients) == shards
            model.zero_grad()
        else:
            assert gradients == [None] * len(gradients)
    for part in parts:
        part.unshard()  # then parameters are whole, and have the gradients that were not reduced
    assert byte_size(part.grad for part in model.parameters()) == whole


@pytest.mark.parametrize(("sharded", "deferred"), [("true", 0), ("false", 1)])
def test_trainer_defers_gradient_sync_only_without_fsdp(sharded, deferred, tmp_path, monkeypatch):
    calls = []

    @contextmanager
    def no_sync(self, model):
        calls.append(model)
        yield

    def unsharded(self):
        create(self)
        self.is_fsdp_enabled = False  # one process cannot shard

    create = Trainer.create_accelerator_and_postprocess
    monkeypatch.setenv("ACCELERATE_USE_FSDP", sharded)
    monkeypatch.setattr(Accelerator, "no_sync", no_sync)
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", unsharded)
    recipe = small_recipe(tmp_path)
    assert recipe.batch_size == 2 * recipe.train.micro_batch
    train(recipe)
    assert len(calls) == deferred


def test_gradient_buckets_are_counted_only_for_data_parallel(tmp_path):
    recipe = small_recipe(tmp_path, micro_batch=1, dtype="bfloat16")
    config = model_config(recipe.model.config)
    numbers = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    assert memory_of(recipe, config, Sharding("fsdp2", FSDP, 2)).gradient_buckets == 0
    assert memory_of(recipe, config, Sharding("copies", COPIES, 2)).gradient_buckets == 4 * numbers
    assert memory_of(recipe, config, ONE_GPU).gradient_buckets == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed_zero3_takes_sixteen_bytes_per_parameter(tmp_path, dtype):
    recipe = small_recipe(tmp_path, micro_batch=1, dtype=dtype)
    config = model_config(recipe.model.config)
    numbers = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    estimate = memory_of(recipe, config, Sharding("zero3", ZERO3, 4))
    assert estimate.weights + estimate.gradients + estimate.moments == 16 * -(-numbers // 4)


@pytest.mark.parametrize("changes", [[], ["model.config.tie_word_embeddings=false"]])
def test_activations_and_working_copies_equal_saved_tensors_in_bfloat16(tmp_path, changes):
    """The reference is a forward pass under autocast, where autograd also saves copies of weights."""
    recipe = small_recipe(tmp_path, changes, dtype="bfloat16")
    config = model_config(recipe.model.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    own = {part.untyped_storage().data_ptr() for part in model.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(recipe.train.micro_batch, recipe.data.length, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, use_cache=False)
    estimate = memory_of(recipe, config, ONE_GPU)
    real = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert estimate.activations + estimate.working_copies == pytest.approx(real, rel=0.01)
    assert estimate.working_copies > 0.05 * real
    assert memory_of(small_recipe(tmp_path), config, ONE_GPU).working_copies == 0


def test_memory_of_logits_and_teacher(tmp_path):
    recipe = small_recipe(tmp_path)
    config = model_config(recipe.model.config)
    numbers = recipe.train.micro_batch * recipe.data.length * config.vocab_size
    alone = memory_of(recipe, config, ONE_GPU)
    assert (alone.logits, alone.teacher) == (8 * numbers, 0)
    assert memory_of(small_recipe(tmp_path, dtype="bfloat16"), config, ONE_GPU).logits == 10 * numbers
    taught = toy(load_recipe("small/smollm2_mixture"), tmp_path)
    estimate = memory_of(taught, config, ONE_GPU, Teacher(1000, config.vocab_size, 2))
    assert (estimate.logits, estimate.teacher) == ((8 + 4 + 2 * 2) * numbers, 2000)


def test_activation_checkpointing_reduces_memory(tmp_path):
    config = model_config(small_recipe(tmp_path).model.config)
    again = memory_of(small_recipe(tmp_path, checkpoint_activations=True), config, ONE_GPU)
    assert again.activations < memory_of(small_recipe(tmp_path), config, ONE_GPU).activations
    assert sum(value for key, value in vars(again).items() if key != "total") == again.total
