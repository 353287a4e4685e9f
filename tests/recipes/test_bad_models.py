"""Models that cannot be made, loaded or counted: one clear line each, exit status 1, in training and in a dry run."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer, GPT2Config, OPTConfig

from broken import run
from crosshead.common.errors import RecipeError
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import ONE_GPU
from crosshead.recipes.schema.model_config import DECODERS, model_config, model_types
from crosshead.recipes.schema.toy import write_tokenizer
from crosshead.recipes.trainer.models import check_documents_apart
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
LATENT = {"model_type": "crosshead_deepseek_v3", "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
LATENT |= {"first_k_dense_replace": 1}
VALUES = {
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    "fewer layers than none": ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0"),
    "no key/value heads": ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    "uneven key/value heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    "more key/value heads": ({"num_key_value_heads": 8}, "num_key_value_heads=8"),
    "empty heads": ({"head_dim": 0}, "head_dim=0"),
    "odd heads": ({"head_dim": 3}, "head_dim=3"),
    "heads without a size": (
        {"head_dim": None, "model_type": "crosshead_qwen2"},
        "head_dim=None",
    ),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size=0"),
    "a negative vocabulary": ({"vocab_size": -1}, "vocab_size=-1"),
    "no width": ({"hidden_size": 0}, "hidden_size=0"),
    "a negative width": ({"hidden_size": -4}, "hidden_size=-4"),
    "half a width": ({"intermediate_size": 2.5}, "intermediate_size=2.5"),
    "a flag as a size": ({"max_position_embeddings": True}, "max_position_embeddings=True"),
    "no window": ({"sliding_window": 0, "model_type": "crosshead_qwen2"}, "sliding_window=0"),
    "no experts": (MOE | {"num_experts": 0}, "num_experts=0"),
    "few experts": (
        MOE | {"num_experts_per_tok": 5},
        "num_experts_per_tok=5",
    ),
    "few experts of a latent model": (LATENT | {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    "no number of experts": ({"model_type": "crosshead_deepseek_v2"}, "num_experts_per_tok=None"),
    "no routed experts": (LATENT | {"n_routed_experts": 0}, "n_routed_experts=0"),
    "uneven groups of experts": (LATENT | {"n_group": 3}, "n_group=3"),
    "few groups of experts": (LATENT | {"topk_group": 3}, "topk_group=3"),
    "heads of a latent model": (LATENT | {"head_dim": 128}, "head_dim=128"),
    "an empty latent vector": (LATENT | {"kv_lora_rank": 0}, "kv_lora_rank=0"),
    "an activation": ({"hidden_act": "nosuch"}, "hidden_act='nosuch'"),
    "a rope": (
        {"rope_parameters": {"rope_type": "nosuch"}},
        "rope_parameters.rope_type='nosuch'",
    ),
    "a text as theta": (
        {"rope_parameters": {"rope_theta": "abc"}},
        "rope_parameters.rope_theta='abc'",
    ),
    "a negative theta": (
        {"rope_parameters": {"rope_theta": -1}},
        "rope_parameters.rope_theta=-1",
    ),
    "a text as a factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": "abc"}},
        "rope_parameters.factor='abc'",
    ),
    "dropout": ({"attention_dropout": 2}, "attention_dropout=2"),
    "no dropout": ({"attention_dropout": None}, "attention_dropout=None"),
    "a layer type": (
        {"layer_types": ["linear_attention"] * 2, "model_type": "crosshead_qwen3"},
        "layer_types='linear_attention'",
    ),
    "padding": (
        {"pad_token_id": 99999},
        "pad_token_id=99999",
    ),
    "padding below": ({"pad_token_id": -1}, "pad_token_id=-1"),
    "a list as the model": (
        {"model_type": ["a"]},
        "model_type ['a']",
    ),
}
"""Name of a case -> values of the config, and words of the error."""


@pytest.fixture
def one_line_error(capfd, monkeypatch, tmp_path):
    """A function that runs a command, which must be refused, and returns its one-line error."""
    monkeypatch.chdir(tmp_path)

    def refused(command):
        status, out, err = run(capfd, monkeypatch, command)
        assert (status, out) == (1, ""), err
        assert err.startswith("crosshead: error: ") and err.count("\n") == 1, err
        return err

    return refused


def llama_config(**values):
    return {"model_type": "crosshead_llama"} | SIZES | values


def write_recipe(folder, **model):
    """Write a recipe with its data and tokenizer, and return the name of the recipe's file."""
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
def test_invalid_model_config_values_are_refused(case):
    values, words = VALUES[case]
    with pytest.raises(RecipeError) as caught:
        model_config(llama_config(**values))
    assert "model.config" in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("kind", model_types(DECODERS))
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "attention_dropout": 1, "hidden_act": "gelu"},
        {"pad_token_id": 256, "num_key_value_heads": 4, "head_dim": 4},
    ],
)
def test_valid_model_config_values_are_kept(kind, values):
    if kind.endswith("deepseek_v2") or ("head_dim" in values and "deepseek" in kind):
        pytest.skip("it needs fields of its own, and its sizes have other names")
    result = model_config(llama_config(model_type=kind, **values)).to_dict()
    assert {key: result[key] for key in values} == values


def test_all_dense_deepseek_needs_no_number_of_experts():
    model_config(llama_config(model_type="crosshead_deepseek_v2", first_k_dense_replace=2))


@pytest.mark.parametrize("option", ["", " --dry-run"])
@pytest.mark.parametrize("case", ["no width", "a rope"])
def test_train_command_refuses_invalid_model_config(case, option, one_line_error, tmp_path):
    values, words = VALUES[case]
    err = one_line_error(f"train {write_recipe(tmp_path, config=llama_config(**values))}{option}")
    assert "recipe.yaml" in err and "model.config" in err and words in err


@pytest.mark.parametrize("option", ["", " --dry-run"])
def test_config_error_of_transformers_is_one_line(option, one_line_error, tmp_path):
    """Values that transformers refuses only when the model is built."""
    values = {"rope_type": "longrope", "factor": 2.0, "short_factor": ["a"], "long_factor": ["a"]}
    err = one_line_error(f"train {write_recipe(tmp_path, config=llama_config(rope_parameters=values))}{option}")
    assert "model.config" in err


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


MISMATCHED = {
    "wider": (
        {"hidden_size": 64},
        ("lm_head.weight", "(257, 24)", "(257, 64)"),
    ),
    "more tokens": (
        {"vocab_size": 300},
        ("lm_head.weight", "(257, 24)", "(300, 24)"),
    ),
}


@pytest.mark.parametrize("backbone", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("case", MISMATCHED)
def test_checkpoint_with_mismatched_shapes_is_refused(case, backbone, one_line_error, tmp_path):
    changes, words = MISMATCHED[case]
    edit_config(write_stock(tmp_path / "stock", backbone, vocab_size=257), **changes)
    err = one_line_error(f"train {write_recipe(tmp_path, path='stock')}")
    assert all(word in err for word in (*words, "model.path=stock"))


def test_teacher_with_mismatched_shapes_is_refused(tmp_path):
    recipe = toy_run(MIXTURE, tmp_path)
    edit_config(tmp_path / "teacher", intermediate_size=65)
    with pytest.raises(RecipeError, match=r"distillation\.teacher=.*model\.layers\.0\.mlp"):
        train(recipe)


def test_checkpoint_with_missing_and_mismatched_tensors_is_refused(one_line_error, tmp_path):
    folder = write_stock(tmp_path / "stock", vocab_size=257)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, intermediate_size=65)
    err = one_line_error(f"train {write_recipe(tmp_path, path='stock')}")
    assert "model.path=stock" in err and "model.norm.weight" in err


@pytest.mark.parametrize(
    ("model", "key"), [({}, "model.path=stock"), ({"tokenizer": "bytes"}, "model.tokenizer=bytes")]
)
def test_slow_tokenizer_is_refused(model, key, one_line_error, tmp_path):
    folder = write_stock(tmp_path / "stock", vocab_size=400)
    (folder / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    err = one_line_error(f"train {write_recipe(tmp_path, path='stock', **({'tokenizer': None} | model))}")
    assert all(word in err for word in (key, "ByT5Tokenizer", "tokenizer.json"))


def write_gpt2(folder):
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=257, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def test_dry_run_refuses_unknown_model_family(one_line_error, tmp_path):
    write_gpt2(tmp_path / "gpt2")
    err = one_line_error(f"train {write_recipe(tmp_path, path='gpt2')} --dry-run")
    assert "model.path=gpt2" in err and "model_type='gpt2'" in err


@pytest.mark.parametrize("option", ["", " --dry-run"])
@pytest.mark.parametrize("with_model", [True, False])
def test_unmerged_peft_adapter_is_refused(with_model, option, one_line_error, tmp_path):
    write_stock(tmp_path / "stock", vocab_size=257)
    (tmp_path / "stock" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "other"}'
    )
    if not with_model:
        for path in (tmp_path / "stock").iterdir():
            if path.name != "adapter_config.json":
                path.unlink()
    err = one_line_error(f"train {write_recipe(tmp_path, path='stock', tokenizer=None)}{option}")
    assert "model.path=stock has adapters of peft" in err and "merge_and_unload()" in err


def test_window_longer_than_context_of_stored_model_is_refused(one_line_error, tmp_path):
    write_stock(tmp_path / "stock", vocab_size=257, max_position_embeddings=32)
    err = one_line_error(f"train {write_recipe(tmp_path, path='stock')}")
    assert "data.length=64" in err and "max_position_embeddings=32" in err


def test_separate_documents_are_refused_for_opt(one_line_error, tmp_path):
    shape = OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=257)
    shape.word_embed_proj_dim = 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "opt")
    err = one_line_error(f"train {write_recipe(tmp_path, path='opt')} --set data.separate_documents=true")
    assert "data.separate_documents=true" in err and "OPTForCausalLM" in err
    for folder in (write_gpt2(tmp_path / "gpt2"), write_stock(tmp_path / "stock", vocab_size=257)):
        check_documents_apart(AutoModelForCausalLM.from_pretrained(folder), "model")


def test_attention_transfer_is_refused_for_gpt2(one_line_error, tmp_path):
    write_gpt2(tmp_path / "gpt2")
    recipe = write_recipe(tmp_path, path="gpt2")
    err = one_line_error(f"train {recipe} --set distillation.teacher=gpt2 --set distillation.transfer_steps=1")
    assert "match_steps, together 1, compare layers" in err and "'self_attn'" in err and "GPT2LMHeadModel" in err


def test_dry_run_counts_memory_of_gpt2_teacher(tmp_path):
    recipe = toy_run(MIXTURE, tmp_path)
    folder = write_gpt2(tmp_path / "gpt2")
    recipe = replace(recipe, distillation=replace(recipe.distillation, teacher=str(folder)))
    numbers = sum(part.numel() for part in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert dry_run(recipe, ONE_GPU)["memory_per_gpu"]["teacher"] == 4 * numbers


@pytest.mark.parametrize(("section", "key"), [("model", "model.path"), ("teacher", "distillation.teacher")])
def test_dry_run_refuses_invalid_stored_config(section, key, tmp_path):
    recipe = toy_run(MIXTURE if section == "teacher" else KNOCKING, tmp_path)
    recipe = replace(recipe, model=replace(recipe.model, config=None))
    edit_config(tmp_path / section, hidden_act="nosuch")
    with pytest.raises(RecipeError, match=f"{key}={tmp_path / section}.*'nosuch'"):
        dry_run(recipe, ONE_GPU)
