"""Access tokens in a model's files are left out or refused; `test_every_command.py` searches all outputs for them."""

import json
from pathlib import Path

import pytest

import crosshead
from command_chain import FILES, PLANTED, plant
from crosshead.common.access_tokens import leave_out_tokens
from crosshead.recipes.published_recipe import published_recipe, without_folders
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.loading import load_tokenizer
from crosshead.recipes.trainer.models import load_model
from toy_checkpoints import write_stock
from toy_training import KNOCKING, toy_run
from toys import mixed_config


def test_training_with_token_in_tokenizer_config_is_refused(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path)
    plant(Path(recipe.model.tokenizer or "", "tokenizer_config.json"))
    with pytest.raises(ValueError, match=r"model\.tokenizer=.*tokenizer_config\.json") as caught:
        train(recipe)
    assert PLANTED not in str(caught.value) and not Path(recipe.output).exists()


@pytest.mark.parametrize("file", ["LICENSE", "chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_token_in_text_file_is_refused(file, tmp_path):
    source = write_stock(tmp_path / "source")
    (source / file).parent.mkdir(exist_ok=True)
    (source / file).write_text(f"key: {PLANTED}")
    assert_refused(source, f"{Path(file).name} of {source} contains an access token: remove it")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_token_in_json_key_is_refused(file, tmp_path):
    source = write_stock(tmp_path / "source")
    (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | {PLANTED: 1}))
    assert_refused(source, f"{file} of {source} contains an access token")


def test_token_in_gguf_chat_template_is_refused(tmp_path):
    gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)
    metadata = {"tokenizer.chat_template": f"{{# {PLANTED} #}}"}
    source = gguf_toys.write_model(tmp_path / "toy.gguf", gguf_toys.model("Llama"), "Llama", **metadata)
    assert_refused(source, f"chat_template.jinja of {source} contains an access token")


def assert_refused(source, words):
    """Assert that a conversion fails before it writes anything and that the message does not contain the token."""
    with pytest.raises(ValueError, match=words) as caught:
        crosshead.convert(source, source.parent / "made", {"knocking": {}}, verify=False)
    assert PLANTED not in str(caught.value)
    assert [path for path in source.parent.iterdir() if path != source] == []


def test_leave_out_tokens_refuses_token_in_nested_key(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": {PLANTED: 1}}))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        leave_out_tokens([tmp_path / "config.json"])
    assert PLANTED not in str(caught.value)


def test_configs_of_model_to_train_contain_no_token(tmp_path):
    """Checkpoints and trackers are written from these in-memory configs."""
    recipe = toy_run(KNOCKING, tmp_path)
    for name in FILES[:2]:
        plant(Path(recipe.model.path, name))
    model = load_model(recipe, load_tokenizer(recipe))
    for config in (model.config, model.generation_config):
        assert PLANTED not in str(config.to_dict()) and config.to_dict()["kept"] == {"by": "us"}


def test_config_is_saved_without_token(tmp_path):
    config = mixed_config("Llama", {"knocking": {}})
    config.use_auth_token = PLANTED
    config.save_pretrained(tmp_path)
    assert PLANTED not in (tmp_path / "config.json").read_text() + str(config)
    assert json.loads((tmp_path / "config.json").read_text())["mixers"] == config.mixers


COMMANDS = {
    "convert --files a,/data/alice/secret/b": "convert --files a,b",
    "convert --files=/data/alice/secret/b /data/alice/c/": "convert --files=b c",
    "/data/alice/bin/crosshead convert /data/alice/m out": "crosshead convert m out",
    "convert '/data/alice smith/secret/m' out": "convert m out",
    'convert "/data/alice\'s models/secret/m" out': "convert m out",
    "convert /data/alice\\ smith/secret/my\\ m out": "convert 'my m' out",
    "convert '/data/alice smith/secret/m": "convert m",
    "convert /data/alice/clients/'my model' \"/data/alice\"/m out": "convert 'my model' m out",
    'convert /data/alice/clients/"$M" $HOME/clients/m "${HOME}/clients/n"': "convert '$M' m n",
    "convert -o/data/alice/m --text=~/clients/'a b.txt'": "convert -om '--text=a b.txt'",
    "bash -c 'crosshead convert /data/alice/m /data/alice/out'": "bash -c 'crosshead convert out'",
    "convert file:///data/alice/m model@/data/alice/n calib:/data/alice/o": "convert file:m model@n calib:o",
    "convert FILE://localhost/data/alice/m": "convert FILE:m",
    "(convert /data/alice/m) | tee `/data/alice/n` >/data/alice/o": "(convert m) | tee `n` >o",
    "convert ~/clients/acme/m ~alice/clients/n": "convert m n",
    "convert https://host/a/b org/model@main books/**/*.md ./a/b ../c/d": None,
    "convert m \\\n  --mixers '{\"knocking\": {}}' \\\n  out && echo $DONE": None,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_published_command_has_no_folders(command):
    assert without_folders({"convert": command}) == {"convert": COMMANDS[command] or command}


def test_published_recipe_has_no_folders():
    content = {
        "output": "/data/alice smith/x/runs/x/",
        "model": {"path": "org/model", "tokenizer": "/data/alice/my tokenizer"},
        "sources": [{"path": "/data/alice/books/**/*.md"}, {"path": "books/*/a.md"}, {"path": "file:///data/a b/c"}],
        "labels": {0: "black / white", 1: "and/or"},
        "seed": 0,
    }
    assert without_folders(content) == {
        "output": "x",
        "model": {"path": "org/model", "tokenizer": "my tokenizer"},
        "sources": [{"path": "*.md"}, {"path": "books/*/a.md"}, {"path": "file:c"}],
        "labels": {0: "black / white", 1: "and/or"},
        "seed": 0,
    }


def test_folders_below_home_are_left_out_of_published_recipe():
    changes = ["data.sources=[{path: ~/clients/acme/x}]", "data.cache=~/clients/acme/y"]
    published = published_recipe(load_recipe(KNOCKING, changes))
    assert published["data"]["sources"][0]["path"] == "x" and "cache" not in published["data"]
