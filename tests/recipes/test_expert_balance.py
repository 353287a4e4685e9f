"""Expert biases: the counted loads, the update rule, and independence of how a step is divided."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from crosshead.common.errors import RecipeError
from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import ONE_GPU
from crosshead.recipes.schema.model_config import check_expert_bias
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.load_balance import ExpertBalance, load_biases_everywhere
from crosshead.recipes.trainer.models import check_expected
from tiers import first
from toy_checkpoints import write_stock
from toy_training import EXPERTS, KNOCKING, losses, metrics, resumed, toy_run, weights
from toys import mixed_model, tokens
from training_sessions import Run

RATE = 0.05
DIVISIONS = ((1, 8), (2, 4), (1, 4))
"""(number of processes, micro batch size) of each run."""
AGAIN = {"micro_batch": 2, "checkpoint_activations": True}
NONE = "expert_bias_rate"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def moe_model(**changes):
    return mixed_model("Qwen3Moe", {}, expert_bias=True, **changes).train()


def expert_biases(model):
    return [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers]


def count_expert_loads(model, ids):
    """Return the number of tokens that select each expert, per layer, counted token by token."""
    logits = model(ids, output_router_logits=True).router_logits
    layers = []
    for layer, bias in zip(logits, expert_biases(model), strict=True):
        counts = [0] * len(bias)
        for token in layer.softmax(-1):
            for expert in (token + bias).topk(2).indices.tolist():
                counts[expert] += 1
        layers.append(counts)
    return layers


def updated_biases(bias, counts):
    """Return the biases after one update: up by RATE for loads below the mean, down for loads above it."""
    mean = sum(counts) / len(counts)
    signs = [(mean > count) - (mean < count) for count in counts]
    return torch.tensor([old + RATE * sign for old, sign in zip(bias.tolist(), signs, strict=True)])


@pytest.mark.parametrize("checkpointing", (False, True))
def test_bias_update_follows_load_of_whole_step(checkpointing):
    """Loads are summed over the micro batches of a step; recomputation in a backward pass is not counted."""
    model = moe_model()
    if checkpointing:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    balance = ExpertBalance(model, RATE)
    for step in range(3):
        parts = [tokens(2, 9, seed=10 * step + part) for part in range(2)]
        counted = [count_expert_loads(model, ids) for ids in parts]
        expected = [
            updated_biases(bias, [sum(pair) for pair in zip(*both, strict=True)])
            for bias, *both in zip(expert_biases(model), *counted, strict=True)
        ]
        for ids in parts:
            with balance.counting():
                loss = model(ids, labels=ids).loss
            loss.backward()
            model(ids)  # as an evaluation would
        balance.on_optimizer_step(None, None, None)
        for bias, target in zip(expert_biases(model), expected, strict=True):
            assert torch.allclose(bias, target, atol=1e-7) and bias.abs().max() > 0
        totals = [sum(pair) for pair in zip(counted[0][1], counted[1][1], strict=True)]
        assert balance.metrics()["expert_load/1/most"] == pytest.approx(max(totals) / 18)
        assert balance.metrics()["expert_load/1/least"] == pytest.approx(min(totals) / 18)


def test_bias_updates_balance_expert_load():
    model = moe_model(num_experts=8)
    balance, maxima = ExpertBalance(model, 0.003), []
    with torch.no_grad():
        for _ in range(120):
            with balance.counting():
                model(tokens(8, 32))
            balance.on_optimizer_step(None, None, None)
            maxima.append(balance.metrics()["expert_load/0/most"])
    assert maxima[0] > 1.4 and max(maxima[-10:]) < 1.2


def test_biases_stay_zero_without_rate():
    model = moe_model()
    balance = ExpertBalance(model, None)
    with balance.counting():
        model(tokens())
    balance.on_optimizer_step(None, None, None)
    assert not any(bias.any() for bias in expert_biases(model)) and balance.metrics() == {}


def trained_biases(recipe):
    return {name: tensor for name, tensor in weights(recipe).items() if EXPERT_BIAS in name}


def logged_loads(recipe):
    """Return the expert loads in each line of the metrics."""
    return [{key: line[key] for key in line if key.startswith("expert_load/")} for line in metrics(recipe)]


def expert_run(folder, **changes):
    return toy_run(EXPERTS, folder, steps=5, train={"expert_bias_rate": RATE} | changes)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A finished run whose steps are each one micro batch."""
    recipe = expert_run(tmp_path_factory.mktemp("whole"), micro_batch=4)
    train(recipe)
    return recipe


def test_trained_biases_are_multiples_of_rate(finished_run):
    trained = trained_biases(finished_run)
    assert len(trained) == 4 and all(tensor.dtype == torch.float32 for tensor in trained.values())
    for tensor in trained.values():
        steps = tensor / RATE
        assert torch.allclose(steps, steps.round(), atol=1e-4) and 0 < steps.abs().max() <= 5.001


@pytest.mark.parametrize("changes", first([AGAIN, {"micro_batch": 2}, {"micro_batch": 1}]))
def test_biases_and_loads_do_not_depend_on_micro_batch_size(changes, finished_run, tmp_path):
    """Biases and loads are whole numbers of update steps and tokens, so that they are equal to the bit."""
    recipe, expected = expert_run(tmp_path, **changes), trained_biases(finished_run)
    train(recipe)
    assert losses(recipe) == pytest.approx(losses(finished_run), abs=2e-6)
    assert (
        logged_loads(recipe) == logged_loads(finished_run)
        and {"expert_load/3/most", "expert_load/0/least"} <= logged_loads(recipe)[0].keys()
    )
    assert all(torch.equal(tensor, expected[key]) for key, tensor in trained_biases(recipe).items())


def test_resumed_run_has_same_losses_loads_and_weights(finished_run, tmp_path):
    killed = expert_run(tmp_path, micro_batch=4)
    resumed(killed, 1, 3, 4)
    assert losses(killed) == losses(finished_run) and logged_loads(killed) == logged_loads(finished_run)
    assert all(torch.equal(tensor, weights(killed)[key]) for key, tensor in weights(finished_run).items())


@pytest.mark.slow
@pytest.mark.distributed
def test_expert_loads_do_not_depend_on_number_of_processes(tmp_path):
    length = expert_run(tmp_path / "recipe").data.length
    recipe = toy_run(
        EXPERTS,
        tmp_path / "recipe",
        documents=100,
        train={"expert_bias_rate": RATE, "batch_tokens": 8 * length, "tokens": 8 * 8 * length},
    )
    results = []
    for processes, at_once in DIVISIONS:
        run = Run(recipe, tmp_path, f"{processes}-{at_once}")
        run.finish(processes, f"train.micro_batch={at_once}")
        spread = [{key: line[key] for key in line if key.startswith("expert_load/")} for line in run.metrics()]
        results.append((list(run.losses().values()), spread))
    for values, spread in results[1:]:
        assert values == pytest.approx(results[0][0], abs=1e-5) and spread == results[0][1]


def test_bias_rate_for_model_without_expert_biases_is_refused(tmp_path):
    for name in (KNOCKING, "papers/kha_moe_a0.8b_6.6b"):
        changes = ["train.expert_bias_rate=0.01"] + ["model.config.expert_bias=false"] * (name != KNOCKING)
        with pytest.raises(RecipeError, match=NONE):
            load_recipe(name, changes)
    source = write_stock(tmp_path / "stock", "Qwen3Moe", vocab_size=257)
    recipe = toy_run(KNOCKING, tmp_path, model={"path": str(source), "config": None}, train={"expert_bias_rate": RATE})
    with pytest.raises(RecipeError, match=NONE):
        dry_run(recipe, ONE_GPU)
    with pytest.raises(RecipeError, match=NONE):
        train(recipe)
    assert not Path(recipe.output).exists()


def test_bias_rate_for_deepseek_v3_is_refused():
    """DeepSeek-V3 has expert biases, but they are not updated."""
    config = SimpleNamespace(model_type="crosshead_deepseek_v3")
    with pytest.raises(RecipeError, match=r"expert_bias_rate=0\.01.*Qwen3-MoE") as caught:
        check_expert_bias(config, 0.01)
    assert "no biases" not in str(caught.value)


def test_bias_rate_with_lora_and_bias_rate_zero_are_refused():
    lora = ["train.expert_bias_rate=0.01", "train.trainable=mixers+lora", "train.lora={rank: 4, alpha: 8}"]
    with pytest.raises(RecipeError, match=re.escape("trainable='mixers+lora'")):
        load_recipe(EXPERTS, lora)
    with pytest.raises(RecipeError, match="expert_bias_rate"):
        load_recipe(EXPERTS, ["train.expert_bias_rate=0"])


def test_stored_expert_bias_must_match_model_config():
    without, biased = mixed_model("Qwen3Moe", {}).config, moe_model().config
    for stored, expected in ((without, biased), (biased, without)):
        with pytest.raises(RecipeError, match=r"model\.path.*expert_bias"):
            check_expected(stored, expected, ())
        check_expected(stored, stored, ())


def test_fsdp_loads_expert_biases_in_every_process():
    def accelerator():
        return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_ram_efficient_loading=True)))

    config, sharded = moe_model().config, accelerator()
    load_biases_everywhere(sharded, config, None)
    assert not sharded.state.fsdp_plugin.cpu_ram_efficient_loading
    with pytest.raises(RecipeError, match="--fsdp_cpu_ram_efficient_loading"):
        load_biases_everywhere(accelerator(), config, "somewhere")
    sharded = accelerator()
    load_biases_everywhere(sharded, mixed_model("Qwen3Moe", {}).config, "somewhere")
    assert sharded.state.fsdp_plugin.cpu_ram_efficient_loading
