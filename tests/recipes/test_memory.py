"""Memory estimates: weights, gradients and moments exactly as in a run or its shards; activations closely."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch import distributed
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer

import toys
from crosshead.recipes.estimate.memory import ALONE, COPIES, FSDP, ONE_GPU, ZERO3, Sharding, Teacher, memory
from crosshead.recipes.schema.load import load_recipe
from crosshead.recipes.schema.model_config import model_config
from crosshead.recipes.schema.toy import toy
from crosshead.recipes.train import train
from crosshead.recipes.trainer.callbacks import StopOnSignal
from tiers import first

LORA = ["train.trainable=mixers+lora", "train.lora={rank: 4, alpha: 8}"]
TRAINABLE = {"all": [], "mixers": ["train.trainable=mixers"], "mixers+lora": LORA}


def small(folder, changes=(), **train_changes):
    """Return a toy recipe of SmolLM2 with explicit heads and one step."""
    recipe = toy(load_recipe("small/smollm2_explicit", changes), folder)
    options = replace(recipe.train, tokens=recipe.train.batch_tokens, warmup=0.0, **train_changes)
    return replace(recipe, train=options, distillation=None)


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("trainable", first(reversed(TRAINABLE)))
def test_weights_gradients_and_moments_are_those_of_a_run(trainable, tmp_path, monkeypatch):
    measured = {}

    def measure(self, args, state, control, model=None, optimizer=None, **_):
        states = optimizer.state.values()
        measured["weights"] = size(model.parameters())
        measured["gradients"] = size(part.grad for part in model.parameters() if part.grad is not None)
        measured["moments"] = size(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))

    monkeypatch.setattr(StopOnSignal, "on_optimizer_step", measure)
    recipe = small(tmp_path, TRAINABLE[trainable])
    train(recipe)
    estimate = memory(recipe, model_config(recipe.model.config), ONE_GPU, None)
    assert {"weights": estimate.weights, "gradients": estimate.gradients, "moments": estimate.moments} == measured


@pytest.fixture
def eight():
    """A device mesh of eight processes, faked in this process."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", rank=0, world_size=8, store=fake.FakeStore())
    yield init_device_mesh("cpu", (8,))
    distributed.destroy_process_group()


def test_shards_are_those_of_fsdp(eight, tmp_path):
    recipe = small(tmp_path, micro_batch=1)
    recipe = replace(recipe, train=replace(recipe.train, batch_tokens=8 * 64, tokens=8 * 64))
    config = toys.mixed_config("Qwen3Moe", toys.CASES["explicit"])
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=eight)
    fully_shard(model, mesh=eight)
    estimate = memory(recipe, config, Sharding("fsdp2", FSDP, 8), None)
    assert estimate.weights == estimate.gradients == size(part.to_local() for part in model.parameters())
    assert estimate.moments == 2 * estimate.weights and estimate.gradient_buckets == 0


def test_gradients_of_every_micro_batch_are_shared_out(eight, tmp_path, monkeypatch):
    """With gradient sync after each micro batch, FSDP2 keeps shards of gradients only; without, whole gradients."""
    model = AutoModelForCausalLM.from_config(toys.mixed_config("Llama", toys.CASES["explicit"]))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=eight)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for shared in (True, False):
        model.set_requires_gradient_sync(shared)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        has_gradient = [part.grad is not None for part in model.parameters()]
        assert all(has_gradient) == shared
        model.zero_grad()


@pytest.mark.parametrize(("sharded", "deferred"), [("true", 0), ("false", 1)])
def test_the_trainer_shares_them_out(sharded, deferred, tmp_path, monkeypatch):
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
    recipe = small(tmp_path)
    assert recipe.batch_size == 2 * recipe.train.micro_batch
    train(recipe)
    assert len(calls) == deferred


def test_buckets_of_gradients(tmp_path):
    recipe = small(tmp_path, micro_batch=1, dtype="bfloat16")
    config = model_config(recipe.model.config)
    numbers = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    assert memory(recipe, config, Sharding("fsdp2", FSDP, 2), None).gradient_buckets == 0
    assert memory(recipe, config, Sharding("copies", COPIES, 2), None).gradient_buckets == 4 * numbers
    assert memory(recipe, config, ONE_GPU, None).gradient_buckets == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed_has_sixteen_bytes_a_number(tmp_path, dtype):
    recipe = small(tmp_path, micro_batch=1, dtype=dtype)
    config = model_config(recipe.model.config)
    numbers = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    estimate = memory(recipe, config, Sharding("zero3", ZERO3, 4), None)
    assert estimate.weights + estimate.gradients + estimate.moments == 16 * -(-numbers // 4)


@pytest.mark.parametrize("changes", [[], ["model.config.tie_word_embeddings=false"]])
def test_copies_in_bfloat16(tmp_path, changes):
    """Activations and working copies are all the tensors that autograd saves in a step under autocast."""
    recipe = small(tmp_path, changes, dtype="bfloat16")
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
    estimate = memory(recipe, config, ONE_GPU, None)
    real = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert estimate.activations + estimate.working_copies == pytest.approx(real, rel=0.01)
    assert estimate.working_copies > 0.05 * real
    assert memory(small(tmp_path), config, ONE_GPU, None).working_copies == 0


def test_logits_and_a_teacher(tmp_path):
    recipe = small(tmp_path)
    config = model_config(recipe.model.config)
    numbers = recipe.train.micro_batch * recipe.data.length * config.vocab_size
    alone = memory(recipe, config, ONE_GPU, None)
    assert (alone.logits, alone.teacher) == (8 * numbers, 0)
    assert memory(small(tmp_path, dtype="bfloat16"), config, ONE_GPU, None).logits == 10 * numbers
    taught = toy(load_recipe("small/smollm2_mixture"), tmp_path)
    estimate = memory(taught, config, ONE_GPU, Teacher(1000, config.vocab_size, 2))
    assert (estimate.logits, estimate.teacher) == ((8 + 4 + 2 * 2) * numbers, 2000)


def test_computing_layers_again_saves_activations(tmp_path):
    config = model_config(small(tmp_path).model.config)
    again = memory(small(tmp_path, checkpoint_activations=True), config, ONE_GPU, None)
    assert again.activations < memory(small(tmp_path), config, ONE_GPU, None).activations
    assert sum(value for key, value in again.as_dict().items() if key != "total") == again.as_dict()["total"]
    assert ONE_GPU.kind == ALONE
