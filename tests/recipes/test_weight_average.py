"""The moving average of the weights against one computed from the checkpoints of every step."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, Trainer

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import FSDP, ONE_GPU, ZERO3, Sharding
from crosshead.recipes.schema.recipe import Recipe, load_recipe
from crosshead.recipes.schema.sections import LoraOptions
from crosshead.recipes.trainer.loading import load_tokenizer
from crosshead.recipes.trainer.parameters import MIXERS
from crosshead.recipes.trainer.weight_average import WeightAverage
from toy_training import KNOCKING, LORA, metrics, resumed, toy_run, train, weights
from training_sessions import Run

DECAY = 0.7
EVERY_STEP = {"every": 1, "keep": 99}


def averaged_run(folder: Path, name: str = KNOCKING, **changes: Any) -> Recipe:
    train_options = {"average": DECAY, "learning_rate": 1e-2, **changes}
    return toy_run(name, folder, train=train_options, checkpoints=EVERY_STEP)


def checkpoints(output: str | Path, file: str = "model.safetensors") -> list[dict[str, torch.Tensor]]:
    """Return the tensors of all checkpoints in float64, in the order of steps."""
    folders = sorted(Path(output).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    return [{name: part.double() for name, part in load_file(folder / file).items()} for folder in folders]


def expected_average(before: dict[str, torch.Tensor], output: str | Path) -> dict[str, torch.Tensor]:
    """Return the average over the initial weights and the weights after each step."""
    average = {name: part.double() for name, part in before.items()}
    for weights_of_step in checkpoints(output):
        average = {name: DECAY * part + (1 - DECAY) * weights_of_step[name] for name, part in average.items()}
    return average


def initial_weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(str(recipe.model.path), "model.safetensors"))


def assert_close(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, part in expected.items():
        torch.testing.assert_close(result[name].double(), part, rtol=0, atol=1e-6)


@pytest.mark.parametrize("trainable", ["all", "mixers"])
def test_result_is_moving_average_of_weights(trainable: str, tmp_path: Path) -> None:
    recipe = averaged_run(tmp_path, trainable=trainable)
    assert recipe.batch_size == 2 * recipe.train.micro_batch  # one update for two micro batches
    train(recipe)
    before, result, steps = initial_weights(recipe), weights(recipe), checkpoints(recipe.output)
    assert len(steps) == recipe.steps == 4
    assert_close(result, expected_average(before, recipe.output))
    trained = {name for name in before if trainable == "all" or ".mixers." in name}
    assert set(checkpoints(recipe.output, "average.safetensors")[-1]) == trained
    for name, part in result.items():
        assert torch.equal(part, before[name]) == (name not in trained), name
    assert any((result[name].double() - steps[-1][name]).abs().max() > 1e-4 for name in trained)


def test_drift_is_of_averaged_weights(tmp_path: Path) -> None:
    recipe = averaged_run(tmp_path)
    train(recipe)
    before, after = initial_weights(recipe), weights(recipe)
    moved = [(after[name] - before[name]).norm() / len(part) ** 0.5 for name, part in before.items() if MIXERS in name]
    assert metrics(recipe)[-2]["drift/knocking"] == pytest.approx(float(sum(moved) / len(moved)), rel=1e-4)


def test_eval_loss_is_of_averaged_weights(tmp_path: Path) -> None:
    recipe = averaged_run(tmp_path)
    train(recipe)
    model = AutoModelForCausalLM.from_pretrained(Path(recipe.output, "model"))
    windows = open_data(recipe.data, load_tokenizer(recipe), model.config.vocab_size).evaluation
    ids = torch.stack([torch.as_tensor(window["input_ids"]) for window in windows])
    with torch.no_grad():
        loss = functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert metrics(recipe)[-1]["eval_loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("name", [KNOCKING, LORA])
def test_resumed_run_ends_with_same_average(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora": LoraOptions(2, 4.0)} if name == LORA else {}
    once = averaged_run(tmp_path / "once", name, **changes)
    train(once)
    again = averaged_run(tmp_path / "again", name, **changes)
    resumed(again, 3)
    expected = weights(once)
    assert all(torch.equal(part, expected[key]) for key, part in weights(again).items())
    plain = replace(once, output=str(tmp_path / "plain"), train=replace(once.train, average=None))
    train(plain)
    stored = Path(plain.output, "checkpoint-4")
    assert not (stored / "average.safetensors").exists()
    # The training itself is not changed by the average or its evaluations.
    file = "adapter_model.safetensors" if name == LORA else "model.safetensors"
    for key, part in checkpoints(once.output, file)[-1].items():
        assert torch.equal(part, load_file(stored / file)[key].double()), key


def test_lora_factors_are_averaged_before_merge(tmp_path: Path) -> None:
    """The product of averaged factors, not the average of products."""
    recipe = averaged_run(tmp_path, LORA, lora=LoraOptions(2, 4.0))
    train(recipe)
    average, before, result = (
        checkpoints(recipe.output, "average.safetensors")[-1],
        initial_weights(recipe),
        weights(recipe),
    )
    layer = "model.layers.0.self_attn.q_proj"
    down, up = (average[f"base_model.model.{layer}.lora_{part}.default.weight"] for part in "AB")
    expected = before[f"{layer}.weight"].double() + 4.0 / 2 * up @ down
    torch.testing.assert_close(result[f"{layer}.weight"].double(), expected, rtol=0, atol=1e-6)


def test_average_of_another_model_is_refused(tmp_path: Path) -> None:
    WeightAverage(torch.nn.Linear(2, 2), DECAY).save(tmp_path)
    with pytest.raises(ValueError, match=r"average\.safetensors.*bias"):
        WeightAverage(torch.nn.Linear(2, 2, bias=False), DECAY).load(tmp_path)


@pytest.mark.parametrize("kind", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_average_with_sharding_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    initialise = Trainer.__init__

    def sharded(self: Any, **options: Any) -> None:
        initialise(self, **options)
        setattr(self, kind, True)
        plugin = SimpleNamespace(state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False)
        self.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))

    monkeypatch.setattr(Trainer, "__init__", sharded)
    with pytest.raises(RecipeError, match=r"train\.average=0\.7.*FSDP"):
        train(averaged_run(tmp_path))


@pytest.mark.parametrize("kind", [FSDP, ZERO3])
def test_dry_run_counts_average_and_refuses_sharding(kind: str) -> None:
    recipe = load_recipe("small/smollm2_explicit", ["model.config.num_hidden_layers=3", "train.average=0.9"])
    report = dry_run(recipe, ONE_GPU)
    assert report["memory_per_gpu"]["average"] == 4 * report["trainable_parameters"]
    with pytest.raises(RecipeError, match=rf"train\.average=0\.9.*{kind}"):
        dry_run(recipe, Sharding("eight", kind, 8))


@pytest.mark.parametrize("value", ["1", "0", "-0.1", "1.5", "nan", "yes"])
def test_invalid_average_values_are_refused(value: str) -> None:
    with pytest.raises(RecipeError, match=rf"train\.average='{value}'"):
        load_recipe(KNOCKING, [f"train.average={value}"])


@pytest.mark.slow
@pytest.mark.distributed
def test_average_of_two_processes_equals_reference(tmp_path: Path) -> None:
    recipe = averaged_run(tmp_path)
    run = Run(recipe, tmp_path, "two")
    run.finish(2, "train.micro_batch=1")
    result = load_file(run.output / "model" / "model.safetensors")
    assert_close(result, expected_average(initial_weights(recipe), run.output))
