"""Runs with objectives other than the next token: losses, scores, resumed and accumulated runs, and refusals."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

from crosshead.common.errors import RecipeError
from crosshead.modeling.mechanisms.knocking import Knocking
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.models import load_model
from crosshead.recipes.trainer.objectives import OBJECTIVES, objective_of
from crosshead.recipes.trainer.teacher_logits import save_teacher
from image_toys import write_image_model
from tiers import first
from toy_training import KNOCKING, losses, metrics, resumed, toy_run, weights

ALBERT, BERT, T5 = "papers/talking_albert_base", "small/bert_mixture", "small/t5_talking"
MIXTURE = "{mixture: {shared_heads: 2, active_heads: 5}}"
CASES = {
    "order": (ALBERT, ["model.config.classifier_dropout_prob=0"]),
    "order, mixture": (
        BERT,
        [
            "objective.segments=order",
            "model.config.hidden_dropout_prob=0",
            "model.config.attention_probs_dropout_prob=0",
        ],
    ),
    "spans": (T5, []),
    "spans, mixture": (T5, [f"model.config.mixers={{encoder: {MIXTURE}, decoder: {MIXTURE}, cross: {MIXTURE}}}"]),
}
"""Name of a case -> recipe, and changes without dropout, so that losses can be recomputed."""


def toy_case(case, folder, steps=4, **changes):
    name, overrides = CASES[case]
    return toy_run(name, folder, steps, given=overrides, **changes)


def objective_model_and_data(recipe):
    """Return the objective, the model at the start of a run, and the data."""
    objective = objective_of(recipe)
    tokenizer = objective.load_processor()
    model = load_model(recipe, tokenizer).eval()
    return objective, model, objective.open_data(tokenizer, model.config, lambda *_: None)


@torch.no_grad()
def stock_loss(model, batch):
    """Return the model's own loss without balance losses, and the model's output."""
    names = {"order_labels": "sentence_order_label" if "albert" in model.config.model_type else "next_sentence_label"}
    out = model(**{names.get(name, name): value for name, value in batch.items()})
    weight = model.config.mechanisms().get("mixture", {}).get("balance_weight", 0.0)
    return out.loss - weight * (out.get("balance_loss") or 0.0), out


def batch_of(samples, indices):
    return {name: torch.stack([samples[index][name] for index in indices]) for name in samples[0]}


@pytest.mark.parametrize("case", CASES)
def test_first_loss_equals_own_loss_of_model(case, tmp_path):
    recipe = toy_case(case, tmp_path, steps=1, watch={"evaluate_every": 1}, train={"tokens": 256, "warmup": 0.0})
    _, model, data = objective_model_and_data(recipe)
    train(recipe)
    samples = data.samples(4, recipe.train.seed)
    batch = batch_of(samples, range(4))
    expected, _ = stock_loss(model, batch)
    counts = (batch["labels"] != -100).sum(1)
    for row, share in enumerate(counts / counts.sum()):  # balance losses are computed per sequence
        alone = stock_loss(model, {name: value[row : row + 1] for name, value in batch.items()})[1]
        expected = expected + 0.01 * share * (alone.get("balance_loss") or 0.0)
    assert losses(recipe) == [pytest.approx(float(expected), abs=2e-5)]
    assert ("mixture" in case) == any("head_load" in key for key in metrics(recipe)[0])


@pytest.mark.parametrize("case", ["order, mixture", *first(["spans, mixture", "order", "spans"])])
def test_accumulation_does_not_change_the_losses(case, tmp_path):
    results = []
    for size in (4, 1):
        recipe = toy_case(case, tmp_path / str(size), steps=3, train={"micro_batch": size, "tokens": 768})
        train(recipe)
        results.append([*losses(recipe), metrics(recipe)[-1]["eval_loss"]])
    assert results[0] == pytest.approx(results[1], abs=1e-4) and results[0][0] == pytest.approx(
        results[1][0], abs=1e-5
    )


@pytest.mark.parametrize("name", first([ALBERT, T5, BERT], 2))
def test_resumed_run_is_bitwise_equal(name, tmp_path):
    whole, parts = toy_run(name, tmp_path / "whole"), toy_run(name, tmp_path / "parts")
    train(whole)
    resumed(parts, 3)
    assert losses(whole) == losses(parts) and len(losses(whole)) == 4
    expected = weights(whole)
    assert all(torch.equal(value, expected[key]) for key, value in weights(parts).items())
    last = [metrics(each)[-1] for each in (whole, parts)]
    assert all(last[0][key] == last[1][key] for key in ("eval_loss", "eval_accuracy"))


@pytest.mark.parametrize("case", ["order", "spans"])
def test_eval_scores_equal_saved_model_on_held_out_text(case, tmp_path):
    recipe = toy_case(case, tmp_path)
    objective, _, data = objective_model_and_data(recipe)
    outcome = train(recipe)
    kind = getattr(transformers, recipe.objective.auto_class)
    model = kind.from_pretrained(outcome.model, trust_remote_code=False).eval()
    batch = batch_of(data.evaluation, range(len(data.evaluation)))
    with torch.no_grad():
        out = model(**{name: value for name, value in batch.items() if "labels" not in name})
    main = out["prediction_logits" if case == "order" else "logits"].flatten(0, 1)
    labels, last = batch["labels"].flatten(), metrics(recipe)[-1]
    assert last["eval_loss"] == pytest.approx(float(functional.cross_entropy(main, labels)), abs=1e-5)
    chosen = labels != -100
    right = (main.argmax(-1) == labels)[chosen].double().mean()
    assert last["eval_accuracy"] == pytest.approx(float(right))
    if case == "order":
        order = batch["order_labels"]
        assert last["eval_order_loss"] == pytest.approx(
            float(functional.cross_entropy(out.sop_logits, order)), abs=1e-5
        )
        assert last["eval_order_accuracy"] == float((out.sop_logits.argmax(-1) == order).double().mean())
    assert transformers.AutoTokenizer.from_pretrained(outcome.model).pad_token == "<pad>"
    assert model.config.pad_token_id == 257 and objective.recipe is recipe


def test_held_out_corruption_does_not_depend_on_seed(tmp_path):
    (_, _, one), (_, _, two) = (
        objective_model_and_data(toy_case("spans", tmp_path, train={"seed": seed})) for seed in (0, 1)
    )
    assert torch.equal(one.evaluation[0]["labels"], two.evaluation[0]["labels"])
    assert not torch.equal(one.samples(4, 0)[0]["labels"], two.samples(4, 1)[0]["labels"])


def test_result_of_a_run_can_be_trained_further(tmp_path):
    """The model of one run is the initial model of another run."""
    outcome = train(toy_case("order", tmp_path, steps=1, train={"tokens": 256, "warmup": 0.0}))
    later = toy_case("order", tmp_path / "later", steps=1, train={"tokens": 256, "warmup": 0.0})
    model = replace(later.model, path=str(outcome.model), config=None)
    resumed = train(replace(later, model=model))
    assert resumed.step == 1
    first, second = (load_file(outcome / "model.safetensors") for outcome in (outcome.model, resumed.model))
    assert all((first[name] - second[name]).abs().max() < 0.05 for name in first)  # a step is at most 0.01


REFUSED = {
    "a decoder": (KNOCKING, ["objective={name: masked_tokens}"], "crosshead_llama.*crosshead_bert"),
    "an encoder": (BERT, ["objective={name: next_token}"], "next_token.*crosshead_bert"),
    "T5 with masks": (T5, ["objective={name: masked_tokens}"], "crosshead_t5"),
    "no name": (BERT, ["objective={share: 0.2}"], "objective.*'name'.*masked_tokens"),
    "another name": (BERT, ["objective.name=masked_token"], "objective has no name.*'masked_tokens'"),
    "an unknown key": (BERT, ["objective.mean_length=3"], "objective has no key 'mean_length'.*'share'"),
    "a wrong value": (T5, ["objective.share=1"], "objective.share='1'"),
    "a wrong choice": (BERT, ["objective.segments=swap"], "objective.segments='swap'"),
    "samples": (BERT, ["train.samples=10"], "train.samples=10.*counts tokens"),
    "no tokens": (BERT, ["train.tokens=null"], "lacks the key 'tokens'"),
    "documents apart": (BERT, ["data.separate_documents=true"], "data.separate_documents.*next_token"),
    "a teacher": (BERT, ["distillation.teacher=folder"], "distillation.*next_token"),
    "LoRA": (BERT, ["train.trainable=mixers+lora", "train.lora={rank: 4, alpha: 8}"], "train.lora.*next_token"),
    "no tokenizer": (ALBERT, ["model.tokenizer=null"], "model.tokenizer is missing"),
    "a misspelt size": (T5, ["model.config.hidden_size=64"], "model.config has no key 'hidden_size'"),
    "a size of nothing": (T5, ["model.config.d_kv=0"], "d_kv"),
    "too long": (BERT, ["data.length=1024"], "max_position_embeddings=512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_objective_recipes_are_refused(case):
    name, overrides, words = REFUSED[case]
    with pytest.raises(RecipeError, match=words):
        load_recipe(name, overrides)


def test_window_longer_than_context_is_refused():
    recipe = load_recipe(BERT)
    config = SimpleNamespace(max_position_embeddings=recipe.data.length - 1)
    with pytest.raises(RecipeError, match=rf"data\.length={recipe.data.length} is more than max_position_embeddings="):
        objective_of(recipe).corruption(None, config)


def test_runs_that_do_not_fit_objective_are_refused(tmp_path):
    recipe = toy_case("order", tmp_path, model={})
    with pytest.raises(RecipeError, match="type_vocab_size=1"):
        train(replace(recipe, model=replace(recipe.model, config=recipe.model.config | {"type_vocab_size": 1})))
    decoder = toy_run(KNOCKING, tmp_path / "decoder")
    with pytest.raises(RecipeError, match=r"masked_tokens.*model_type='crosshead_llama'"):
        train(replace(recipe, model=replace(recipe.model, path=decoder.model.path, config=None)))
    with pytest.raises(RecipeError, match="mask_token"):
        train(replace(recipe, model=replace(recipe.model, tokenizer=decoder.model.tokenizer)))
    with pytest.raises(RecipeError, match=r"train\.checkpoint_activations"):  # ALBERT does not support it
        train(replace(recipe, train=replace(recipe.train, checkpoint_activations=True)))
    with pytest.raises(RecipeError, match=r"distillation\.teacher"):
        save_teacher(recipe, tmp_path / "logits")
    assert not Path(recipe.output).exists()


def test_unknown_auxiliary_loss_is_refused_where_the_loss_lacks_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Knocking, "auxiliary_loss", classmethod(lambda *_: None), raising=False)
    train(toy_run(KNOCKING, tmp_path / "decoder", 2))
    with pytest.raises(RecipeError, match=r"masked_tokens.*'knocking'"):
        train(toy_run(BERT, tmp_path / "encoder", 2, given=["model.config.mixers={knocking: {}}"]))


def test_every_schema_objective_has_a_trainer_class():
    from crosshead.recipes.schema.objectives import OBJECTIVES as SECTIONS

    assert set(OBJECTIVES) == set(SECTIONS)


@pytest.mark.parametrize("case", ["order", "spans"])
def test_model_without_tokenizer_files_is_refused(case, tmp_path):
    """transformers would create a tokenizer that knows special tokens only."""
    recipe = toy_case(case, tmp_path)
    model = objective_model_and_data(recipe)[1]
    model.save_pretrained(tmp_path / "bare")
    (tmp_path / "stock").mkdir()
    stock = {"order": transformers.BertConfig, "spans": transformers.T5Config}[case]
    stock().save_pretrained(tmp_path / "stock")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "stock")) > 1
    changed = replace(recipe.model, path=str(tmp_path / "bare"), config=None, tokenizer=str(tmp_path / "stock"))
    with pytest.raises(RecipeError, match=r"model\.tokenizer=.*stock has no tokenizer with a vocabulary"):
        train(replace(recipe, model=changed))
    assert not Path(recipe.output).exists()


def test_image_model_is_refused_before_its_tokenizer(tmp_path):
    write_image_model(tmp_path / "vit")
    recipe = toy_case("order", tmp_path)
    changed = replace(recipe.model, path=str(tmp_path / "vit"), config=None, tokenizer=None)
    with pytest.raises(RecipeError, match=r"masked_tokens cannot train .*model_type='vit'"):
        train(replace(recipe, model=changed))
