"""Whole runs at toy size end in a model that loads, and resuming a run changes nothing."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosshead.common.errors import RecipeError
from crosshead.recipes import train as module
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.recipe import load_recipe, shipped_recipes
from crosshead.recipes.schema.sections import LoraOptions
from crosshead.recipes.train import Outcome, train
from crosshead.recipes.trainer.loading import load_tokenizer
from crosshead.recipes.trainer.models import load_model
from tiers import first
from toy_checkpoints import write_stock
from toy_training import (
    EXPERTS,
    KNOCKING,
    LORA,
    MIXTURE,
    SCRATCH,
    Killed,
    killed,
    losses,
    metrics,
    resumed,
    toy_run,
    weights,
)

DROPOUT = {"lora": LoraOptions(4, 8.0, 0.2)}
KINDS = (KNOCKING, LORA, MIXTURE, EXPERTS, SCRATCH, "small/qwen3_0.6b_differential", "small/smollm2_talking")
"""Recipes that together cover every mechanism, way of training and kind of model."""
DECODERS = [name for name in shipped_recipes() if load_recipe(name).objective.name == "next_token"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def data_of(recipe):
    tokenizer = load_tokenizer(recipe)
    return open_data(recipe.data, tokenizer, load_model(recipe, tokenizer).config.vocab_size)


def stock_loss(model, samples):
    """Return transformers' own loss over all samples."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    return model.loss_function(logits, labels, vocab_size=model.config.vocab_size).item()


@pytest.mark.parametrize("name", first([*KINDS, *(name for name in DECODERS if name not in KINDS)], len(KINDS)))
def test_shipped_recipe_gives_loadable_model_with_logged_eval_loss(name, tmp_path):
    recipe = toy_run(name, tmp_path, steps=2)
    outcome = train(recipe)
    assert outcome == Outcome(2, 2, None, Path(recipe.output, "model"), outcome.metrics)
    assert len(losses(recipe)) == 2
    model = AutoModelForCausalLM.from_pretrained(outcome.model).eval()
    assert type(model).__name__.startswith("Crosshead") and model.dtype == torch.float32
    evaluation = list(data_of(recipe).evaluation)
    assert len(evaluation) > 3
    assert outcome.metrics["eval_loss"] == pytest.approx(stock_loss(model, evaluation), rel=1e-6)
    assert model.config.use_cache
    assert model.config.to_dict() == AutoModelForCausalLM.from_pretrained(outcome.model).config.to_dict()
    assert AutoTokenizer.from_pretrained(outcome.model).get_vocab() == load_tokenizer(recipe).get_vocab()
    settings = json.loads((outcome.model / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & settings.keys()
    record = json.loads((outcome.model / "training.json").read_text())
    assert record["recipe"]["train"]["tokens"] == recipe.train.tokens and record["processes"] == 1
    assert record["metrics"] == outcome.metrics
    assert not list(Path(recipe.output).rglob("*.bin"))


RESUMED_OPTIONS = {
    LORA: DROPOUT,
    MIXTURE: {"checkpoint_activations": True},
    EXPERTS: {"gradient_clipping": 0.0},
    SCRATCH: {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", first(RESUMED_OPTIONS, 2))
def test_resumed_run_is_bitwise_equal(name, tmp_path):
    runs = [toy_run(name, tmp_path / folder, steps=5, train=RESUMED_OPTIONS[name]) for folder in ("whole", "killed")]
    assert train(runs[0]).metrics == without_time(resumed(runs[1], 1, 3, 4).metrics, train(runs[0]).metrics)
    assert len(losses(runs[0])) == 5
    assert losses(runs[1]) == losses(runs[0])
    assert_equal_weights(*runs)
    logged = [(line["step"], "loss" in line) for line in metrics(runs[1])]
    assert len(set(logged)) == len(logged) == len(metrics(runs[0]))


def without_time(result, expected):
    """Return the metrics with the durations and speeds of `expected`, which alone may differ."""
    return result | {name: value for name, value in expected.items() if "runtime" in name or "_per_second" in name}


def assert_equal_weights(first, second):
    result, expected = weights(second), weights(first)
    assert result.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(result[name], expected[name])] == []


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The recipe of a finished run of six steps with dropout."""
    recipe = toy_run(LORA, tmp_path_factory.mktemp("whole"), steps=6, train=DROPOUT)
    train(recipe)
    return recipe


def test_dropout_changes_losses(finished_run, tmp_path):
    """Otherwise the tests of resumed runs would not cover random numbers."""
    recipe = toy_run(LORA, tmp_path, steps=6, train={"lora": LoraOptions(4, 8.0, 0.0)})
    train(recipe)
    assert losses(recipe) != losses(finished_run)


def test_run_killed_before_saving_result_resumes_identically(finished_run, tmp_path, monkeypatch):
    recipe = toy_run(LORA, tmp_path, steps=6, train=DROPOUT)

    def ended(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(module, "_save", ended)
        with pytest.raises(Killed):
            train(recipe)
    assert not Path(recipe.output, "model").exists()
    before = metrics(recipe)
    train(recipe)
    assert_equal_weights(finished_run, recipe)
    assert metrics(recipe) == before


def test_finished_run_is_not_repeated(tmp_path, monkeypatch):
    recipe = toy_run(KNOCKING, tmp_path)
    outcome = train(recipe)
    before = {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("*")}
    monkeypatch.setattr(module, "RunTrainer", None)
    assert train(recipe) == outcome
    assert {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("*")} == before


def test_evaluation_frequency_does_not_change_training(finished_run, tmp_path):
    often = toy_run(LORA, tmp_path, steps=6, train=DROPOUT, watch={"evaluate_every": 1})
    train(often)
    assert losses(often) == losses(finished_run)
    assert_equal_weights(often, finished_run)
    for recipe, count in ((often, 6), (finished_run, 2)):
        assert sum("eval_loss" in line for line in metrics(recipe)) == count


def test_resume_may_change_logging_and_checkpoint_settings(finished_run, tmp_path):
    recipe = toy_run(LORA, tmp_path, steps=6, train=DROPOUT, watch={"evaluate_every": None})
    killed(recipe, 3)
    train(
        replace(
            recipe,
            watch=replace(recipe.watch, every=3, evaluate_every=3),
            checkpoints=replace(recipe.checkpoints, every=5, keep=3),
        )
    )
    assert losses(recipe) == losses(finished_run)
    lines = [(line["step"], len(line.get("losses", ()))) for line in metrics(recipe)]
    assert lines == [(1, 1), (2, 1), (3, 1), (3, 0), (5, 2), (6, 1), (6, 0)]  # lines after the checkpoint are dropped
    names = sorted(path.name for path in Path(recipe.output).glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-5", "checkpoint-6"]


def test_resume_may_change_micro_batch_and_activation_checkpointing(tmp_path):
    whole, recipe = (toy_run(MIXTURE, tmp_path / name) for name in ("whole", "moved"))
    killed(recipe, 3)
    losses_of(replace(recipe, train=replace(recipe.train, micro_batch=1, checkpoint_activations=True)))
    assert losses(recipe) == pytest.approx(losses_of(whole), abs=1e-6)


@pytest.mark.parametrize("name", first([MIXTURE, KNOCKING]))
def test_losses_do_not_depend_on_micro_batch_size(name, tmp_path):
    results = []
    for at_once in (1, 2, 4):
        distillation = {"match_steps": 2} if name == MIXTURE else {}
        recipe = toy_run(
            name,
            tmp_path / str(at_once),
            train={"micro_batch": at_once},
            data={"separate_documents": True},
            distillation=distillation,
        )
        results.append([*losses_of(recipe), train(recipe).metrics["eval_loss"]])
    assert results[1] == pytest.approx(results[0], abs=2e-6)
    assert results[2] == pytest.approx(results[0], abs=2e-6)


def losses_of(recipe):
    train(recipe)
    return losses(recipe)


@pytest.mark.slow
def test_losses_do_not_depend_on_activation_checkpointing(tmp_path):
    results = [
        losses_of(
            toy_run(
                MIXTURE,
                tmp_path / str(saving),
                train={"checkpoint_activations": saving},
                distillation={"match_steps": 2},
            )
        )
        for saving in (False, True)
    ]
    assert results[1] == pytest.approx(results[0], abs=1e-6)


def test_first_loss_equals_initial_model_on_separate_documents(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, steps=2, data={"separate_documents": True})
    model = AutoModelForCausalLM.from_pretrained(recipe.model.path).eval()
    samples = data_of(recipe).samples(recipe.batch_size, recipe.train.seed)
    batch = [samples[index] for index in range(recipe.batch_size)]
    total, count = 0.0, 0
    for sample in batch:
        starts = [*(sample["position_ids"] == 0).nonzero().flatten().tolist(), len(sample["input_ids"])]
        for begin, end in pairwise(starts):
            if end - begin > 1:
                tokens = sample["input_ids"][begin:end][None]
                total += model(tokens, labels=tokens).loss.item() * (end - begin - 1)
                count += end - begin - 1
    assert count < recipe.batch_size * (recipe.data.length - 1)  # some documents begin inside a window
    train(recipe)
    assert losses(recipe)[0] == pytest.approx(total / count, rel=1e-6)


def test_model_from_scratch_gets_eos_token_of_tokenizer(tmp_path):
    recipe = toy_run(SCRATCH, tmp_path, steps=2)
    model = AutoModelForCausalLM.from_pretrained(train(recipe).model)
    end = load_tokenizer(recipe).eos_token_id
    assert end == model.config.eos_token_id == model.generation_config.eos_token_id


def test_refused_run_leaves_no_output(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path)
    refused = replace(recipe, model=replace(recipe.model, path=str(tmp_path / "nowhere")))
    with pytest.raises(RecipeError, match="nowhere"):
        train(refused)
    assert not Path(recipe.output).exists()


def test_second_run_in_same_output_is_refused(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path)

    def again(stage, done, total, message=""):
        if stage == "training":
            with pytest.raises(RecipeError, match=recipe.output) as caught:
                train(recipe)
            raise caught.value

    with pytest.raises(RecipeError, match=recipe.output):
        train(recipe, again)
    assert train(recipe).model


def test_conversion_record_and_license_files_are_copied_to_result(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, steps=2)
    files = {"conversion.json": "{}", "LICENSE": "do as you please", "NOTICE.txt": "made by others"}
    for name, text in files.items():
        Path(recipe.model.path, name).write_text(text)
    folder = train(recipe).model
    assert {name: (folder / name).read_text() for name in files} == files


def test_stock_model_can_be_trained(tmp_path):
    """Stock models are the baselines of mechanisms."""
    write_stock(tmp_path / "stock", vocab_size=257)
    recipe = toy_run(KNOCKING, tmp_path, steps=2, model={"path": str(tmp_path / "stock"), "config": None})
    outcome = train(recipe)
    model = AutoModelForCausalLM.from_pretrained(outcome.model).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    evaluation = list(data_of(recipe).evaluation)
    assert outcome.metrics["eval_loss"] == pytest.approx(stock_loss(model, evaluation), rel=1e-6)
