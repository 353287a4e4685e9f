"""Models that cannot be made, loaded or counted: one clear line each, exit status 1, in training and in a dry run."""

import json
from dataclasses import replace

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer, GPT2Config

from broken import run
from crosshead.recipes.dry_run import dry_run
from crosshead.recipes.errors import RecipeError
from crosshead.recipes.model_config import CONFIGS, model_config
from crosshead.recipes.sharding import ONE_GPU
from crosshead.recipes.toy import write_tokenizer
from toy_checkpoints import write_stock
from toy_training import KNOCKING, MIXTURE, toy_run, train

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"model_type": "crosshead_qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}
WHOLE = "is not allowed: use a whole number from 1 up"
DIVIDES = "is not allowed: use a number that divides num_attention_heads=4"
VALUES = {
    "no layers": ({"num_hidden_layers": 0}, f"num_hidden_layers=0 {WHOLE}"),
    "fewer layers than none": ({"num_hidden_layers": -1}, f"num_hidden_layers=-1 {WHOLE}"),
    "no heads": ({"num_attention_heads": 0}, f"num_attention_heads=0 {WHOLE}"),
    "no key/value heads": ({"num_key_value_heads": 0}, f"num_key_value_heads=0 {WHOLE}"),
    "uneven key/value heads": ({"num_key_value_heads": 3}, f"num_key_value_heads=3 {DIVIDES}"),
    "more key/value heads": ({"num_key_value_heads": 8}, f"num_key_value_heads=8 {DIVIDES}"),
    "empty heads": ({"head_dim": 0}, f"head_dim=0 {WHOLE}"),
    "odd heads": ({"head_dim": 3}, "head_dim=3 is not allowed: use an even number"),
    "heads without a size": (
        {"head_dim": None, "model_type": "crosshead_qwen2"},
        "head_dim=None is not allowed: use an even number",
    ),
    "no vocabulary": ({"vocab_size": 0}, f"vocab_size=0 {WHOLE}"),
    "a negative vocabulary": ({"vocab_size": -1}, f"vocab_size=-1 {WHOLE}"),
    "no width": ({"hidden_size": 0}, f"hidden_size=0 {WHOLE}"),
    "a negative width": ({"hidden_size": -4}, f"hidden_size=-4 {WHOLE}"),
    "half a width": ({"intermediate_size": 2.5}, f"intermediate_size=2.5 {WHOLE}"),
    "a flag as a size": ({"max_position_embeddings": True}, f"max_position_embeddings=True {WHOLE}"),
    "no window": ({"sliding_window": 0, "model_type": "crosshead_qwen2"}, f"sliding_window=0 {WHOLE}"),
    "no experts": (MOE | {"num_experts": 0}, f"num_experts=0 {WHOLE}"),
    "few experts": (
        MOE | {"num_experts_per_tok": 5},
        "num_experts_per_tok=5 is not allowed: use at most num_experts=4",
    ),
    "an activation": ({"hidden_act": "nosuch"}, "hidden_act='nosuch' is not allowed: use one of 'gelu', "),
    "a rope": (
        {"rope_parameters": {"rope_type": "nosuch"}},
        "rope_parameters.rope_type='nosuch' is not allowed: use one of 'default', 'linear', ",
    ),
    "a text as theta": (
        {"rope_parameters": {"rope_theta": "abc"}},
        "rope_parameters.rope_theta='abc' is not allowed: use a number",
    ),
    "a negative theta": (
        {"rope_parameters": {"rope_theta": -1}},
        "rope_parameters.rope_theta=-1 is not allowed: use a number above 0",
    ),
    "a text as a factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": "abc"}},
        "rope_parameters.factor='abc' is not allowed: use a number",
    ),
    "dropout": ({"attention_dropout": 2}, "attention_dropout=2 is not allowed: use a number from 0 to 1"),
    "no dropout": ({"attention_dropout": None}, "attention_dropout=None is not allowed: use a number"),
    "a layer type": (
        {"layer_types": ["linear_attention"] * 2, "model_type": "crosshead_qwen3"},
        "layer_types='linear_attention' is not allowed: use one of 'full_attention', ",
    ),
    "padding": (
        {"pad_token_id": 99999},
        "pad_token_id=99999 is not allowed: use a token of the vocabulary, from 0 to 256",
    ),
    "padding below": ({"pad_token_id": -1}, "pad_token_id=-1 is not allowed: use a token of the vocabulary"),
    "a list as the model": (
        {"model_type": ["a"]},
        "model.config has no model_type ['a']: allowed are 'crosshead_llama', ",
    ),
}
"""What a configuration has instead, and words of the line."""


@pytest.fixture
def line(capfd, monkeypatch, tmp_path):
    """The command line, refused: its one line."""
    monkeypatch.chdir(tmp_path)

    def refused(command):
        status, out, err = run(capfd, monkeypatch, command)
        assert (status, out) == (1, ""), err
        assert err.startswith("crosshead: error: ") and err.count("\n") == 1, err
        return err

    return refused


def config(**values):
    return {"model_type": "crosshead_llama"} | SIZES | values


def written(folder, **model):
    """A recipe in a file."""
    write_tokenizer(folder / "tokenizer")
    (folder / "text.txt").write_text("a text of many words. " * 100)
    content = {
        "output": "run",
        "model": {"tokenizer": "tokenizer"} | model,
        "data": {"sources": [{"path": "text.txt"}], "length": 64},
        "train": {"learning_rate": 1e-4, "tokens": 64, "batch_tokens": 64},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return "recipe.yaml"


@pytest.mark.parametrize("case", VALUES)
def test_values_are_refused(case):
    values, words = VALUES[case]
    with pytest.raises(RecipeError) as caught:
        model_config(config(**values))
    assert str(caught.value).startswith(words if words.startswith("model.config ") else f"model.config: {words}")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "attention_dropout": 1, "hidden_act": "gelu"},
        {"pad_token_id": 256, "num_key_value_heads": 4, "head_dim": 2},
    ],
)
def test_values_are_allowed(kind, values):
    found = model_config(config(model_type=kind, **values)).to_dict()
    assert {key: found[key] for key in values} == values


@pytest.mark.parametrize("option", ["", " --dry-run"])
@pytest.mark.parametrize("case", ["no width", "a rope"])
def test_the_command_refuses_values(case, option, line, tmp_path):
    values, words = VALUES[case]
    err = line(f"train {written(tmp_path, config=config(**values))}{option}")
    assert f"recipe.yaml: model.config: {words}" in err


@pytest.mark.parametrize("option", ["", " --dry-run"])
def test_what_only_the_library_refuses(option, line, tmp_path):
    """Known when the model is made."""
    values = {"rope_type": "longrope", "factor": 2.0, "short_factor": ["a"], "long_factor": ["a"]}
    err = line(f"train {written(tmp_path, config=config(rope_parameters=values))}{option}")
    assert err.startswith("crosshead: error: model.config: ")


def edited(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


MISMATCHED = {
    "wider": (
        {"hidden_size": 64},
        "lm_head.weight of shape (257, 24), where its config.json asks for (257, 64): use the",
    ),
    "more tokens": (
        {"vocab_size": 300},
        "has lm_head.weight of shape (257, 24), where its config.json asks for (300, 24)",
    ),
}


@pytest.mark.parametrize("backbone", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("case", MISMATCHED)
def test_weights_that_do_not_fit(case, backbone, line, tmp_path):
    changes, words = MISMATCHED[case]
    edited(write_stock(tmp_path / "stock", backbone, vocab_size=257), **changes)
    err = line(f"train {written(tmp_path, path='stock')}")
    assert words in err and "model.path=stock has " in err


def test_a_teacher_whose_weights_do_not_fit(tmp_path):
    recipe = toy_run(MIXTURE, tmp_path)
    edited(tmp_path / "teacher", intermediate_size=65)
    with pytest.raises(RecipeError, match=r"distillation.teacher=.* has model.layers.0.mlp.* of shape \("):
        train(recipe)


def test_weights_that_lack_tensors_and_do_not_fit(line, tmp_path):
    folder = write_stock(tmp_path / "stock", vocab_size=257)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edited(folder, intermediate_size=65)
    err = line(f"train {written(tmp_path, path='stock')}")
    assert "model.path=stock lacks 1 tensors, model.norm.weight first" in err


@pytest.mark.parametrize(
    ("model", "key"), [({}, "model.path=stock"), ({"tokenizer": "bytes"}, "model.tokenizer=bytes")]
)
def test_a_tokenizer_without_a_fast_version(model, key, line, tmp_path):
    folder = write_stock(tmp_path / "stock", vocab_size=400)
    (folder / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    err = line(f"train {written(tmp_path, path='stock', **({'tokenizer': None} | model))}")
    assert f"the tokenizer of {key}, ByT5Tokenizer, has no tokenizer.json (a fast version): use one that has" in err


def gpt2(folder):
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=257, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def test_a_family_that_is_not_counted(line, tmp_path):
    gpt2(tmp_path / "gpt2")
    err = line(f"train {written(tmp_path, path='gpt2')} --dry-run")
    assert "model.path=gpt2: a model of model_type='gpt2' cannot be counted, only one of a Llama or Qwen family" in err


def test_a_teacher_of_another_family_is_counted(tmp_path):
    recipe = toy_run(MIXTURE, tmp_path)
    folder = gpt2(tmp_path / "gpt2")
    recipe = replace(recipe, distillation=replace(recipe.distillation, teacher=str(folder)))
    numbers = sum(part.numel() for part in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert dry_run(recipe, ONE_GPU)["memory_per_gpu"]["teacher"] == 4 * numbers


@pytest.mark.parametrize(("section", "key"), [("model", "model.path"), ("teacher", "distillation.teacher")])
def test_a_stored_configuration_that_no_model_is_made_of(section, key, tmp_path):
    recipe = toy_run(MIXTURE if section == "teacher" else KNOCKING, tmp_path)
    recipe = replace(recipe, model=replace(recipe.model, config=None))
    edited(tmp_path / section, hidden_act="nosuch")
    with pytest.raises(RecipeError, match=f"{key}={tmp_path / section}: 'nosuch'"):
        dry_run(recipe, ONE_GPU)
