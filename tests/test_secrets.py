"""An access token is in nothing that a command writes, prints or sends: not the user's, nor one in a model's files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import crosshead
from crosshead.modeling.access_tokens import leave_out_tokens
from crosshead.recipes.models import load_model, load_tokenizer
from crosshead.recipes.train import train
from hub_server import serving
from toy_checkpoints import write_stock
from toy_data import write_jsonl
from toy_eval import write_scorable
from toy_training import KNOCKING, toy_run
from toys import mixed_config, stock_model

ENVIRONMENT, PLANTED = "hf_" + "TheTokenOfWhoeverRunsTheseCommands", "hf_" + "ATokenThatTheSourceWasLeftWithAlas"
EVERY_COMMAND = """
import shlex, sys
from crosshead_command.main import main

for command in sys.argv[1:]:
    print("$", command, flush=True)
    print("$", command, file=sys.stderr, flush=True)
    sys.argv = ["crosshead", *shlex.split(command)]
    try:
        main()
    except SystemExit as left:
        print("status", left.code, flush=True)
"""
SMALL = "--windows 1 --length 24"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
LEFT_WITH_IT = {*(f"source/{file}" for file in FILES), *(f"ours/{file}" for file in FILES[:2])}
"""A tokenizer's are another matter: what it is told becomes part of its vocabulary."""
RECIPE = """
output: run
model: {path: ours}
data: {sources: [{path: text.jsonl, kind: jsonl}], length: 32}
train: {learning_rate: 1e-4, tokens: 128, batch_tokens: 64, micro_batch: 2}
"""
COMMANDS = {
    "convert source made --mixer knocking:form=linear": 0,
    "convert source heads --mixer explicit:value_heads=1 --save-calibration seen.safetensors": 0,
    "fold made back": 0,
    "verify source made --json": 0,
    "cost made": 0,
    "train recipe.yaml": 0,
    "train recipe.yaml --set model.path=source --set model.tokenizer=ours --set output=stock": 0,
    "eval source made --suite offline --limit 2 --compare": 0,
    "inspect source made --text 'a quick brown fox' --out page.html": 0,
    f"probe heads made --draws 1 {SMALL}": 0,
    f"probe layers source --method svd {SMALL}": 0,
    "card made --eval eval.json --source source": 0,
    "push made me/mine --dry-run": 0,
    "push made me/mine": 0,
    "card ours": 0,
    "push ours me/ours": 1,
    "sweep papers/mea_1b_sweep --toy swept --set sweep.learning_rates=[1e-3,1e-2]": 0,
    "bench decode cache --rounds 1 --out bench.json": 0,
    "zoo": 0,
    "zoo --write pages": 0,
    "demo --tiny": 0,
    "convert none out --mixer knocking --debug": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Every command, run where a token is in the environment and another in the files of two models."""
    folder = tmp_path_factory.mktemp("place")
    source = write_scorable(stock_model("Llama", max_position_embeddings=512), folder / "source")
    crosshead.convert(source, folder / "ours", {"knocking": {}}, verify=False)
    for name in LEFT_WITH_IT:
        plant(folder / name)
    (folder / "recipe.yaml").write_text(RECIPE)
    write_jsonl(folder / "text.jsonl", ["a quick brown fox, " * 20])
    for name in ("temporary", "pages"):
        (folder / name).mkdir()
    settings = {"HF_TOKEN": ENVIRONMENT, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    settings |= {"HF_HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary"), "HOME": str(folder)}
    command = [sys.executable, "-P", "-c", EVERY_COMMAND, *COMMANDS]
    with serving({}) as hub:
        settings |= {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(
            command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False
        )
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    (folder / "hub").mkdir()
    for name, content in hub.repositories["me/mine"].files.items():
        (folder / "hub" / name).write_bytes(content)
    return folder


def plant(path):
    """As a user might have left a token there: as a value of its own, within another one, and on a line of its own."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content.pop("_from_model_config", None)  # with which unknown fields are lost anyhow
    planted = {"use_auth_token": PLANTED, "kept": {"by": "us", "key": f"Bearer {PLANTED}"}, "lines": f"a\n{PLANTED}"}
    path.write_text(json.dumps(content | planted))


def holding(folder, token):
    """The files that hold a token, by their place in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in files if token.encode() in path.read_bytes()}


@pytest.mark.slow
def test_every_command_did_its_work(place):
    statuses = [
        int(line.split()[1]) for line in (place / "stdout").read_text().splitlines() if line.startswith("status ")
    ]
    assert statuses == list(COMMANDS.values()), (place / "stderr").read_text()[-4000:]
    for path in (
        "made",
        "back",
        "heads",
        "seen.safetensors",
        "run/model",
        "eval.json",
        "page.html",
        "bench.json",
        "pages/README.md",
    ):
        assert (place / path).exists(), path


@pytest.mark.slow
def test_the_token_of_the_environment_is_nowhere(place):
    assert holding(place, ENVIRONMENT) == set()


@pytest.mark.slow
def test_the_token_in_a_models_files_goes_no_further(place):
    assert holding(place, PLANTED) == LEFT_WITH_IT
    assert "error: ours/config.json holds an access token" in (place / "stderr").read_text()
    assert (place / "hub" / "config.json").is_file()


@pytest.mark.slow
def test_what_is_left_out_is_said_by_name(place):
    told = json.loads((place / "made" / "conversion.json").read_text())["left_out"]
    assert list(told) == list(FILES)
    assert all(sorted(names) == ["kept.key", "lines", "use_auth_token"] for names in told.values())
    for made in ("made", "back", "run/model"):
        assert json.loads((place / made / "config.json").read_text())["kept"] == {"by": "us"}, made


def test_a_tokenizer_with_a_token_is_not_trained_with(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path)
    plant(Path(recipe.model.tokenizer or "", "tokenizer_config.json"))
    with pytest.raises(ValueError, match=r"holds an access token: take it out of tokenizer_config.json") as caught:
        train(recipe)
    assert PLANTED not in str(caught.value) and not Path(recipe.output).exists()


@pytest.mark.parametrize("file", ["LICENSE", "chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_a_token_in_a_text_is_refused(file, tmp_path):
    source = write_stock(tmp_path / "source")
    (source / file).parent.mkdir(exist_ok=True)
    (source / file).write_text(f"key: {PLANTED}")
    refused(source, f"{Path(file).name} of {source} holds an access token: take it out")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_token_in_a_key_is_refused(file, tmp_path):
    source = write_stock(tmp_path / "source")
    (source / file).write_text(json.dumps(json.loads((source / file).read_text()) | {PLANTED: 1}))
    refused(source, f"{file} of {source} holds an access token")


def test_a_token_in_the_template_of_a_gguf_file_is_refused(tmp_path):
    gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)
    said = {"tokenizer.chat_template": f"{{# {PLANTED} #}}"}
    source = gguf_toys.write_model(tmp_path / "toy.gguf", gguf_toys.model("Llama"), "Llama", **said)
    refused(source, f"chat_template.jinja of {source} holds an access token")


def refused(source, words):
    """A conversion does not begin, and does not repeat the token."""
    with pytest.raises(ValueError, match=words) as caught:
        crosshead.convert(source, source.parent / "made", {"knocking": {}}, verify=False)
    assert PLANTED not in str(caught.value)
    assert [path for path in source.parent.iterdir() if path != source] == []


def test_a_token_that_cannot_be_left_out_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": {PLANTED: 1}}))
    with pytest.raises(ValueError, match=r"config.json holds an access token") as caught:
        leave_out_tokens([tmp_path / "config.json"])
    assert PLANTED not in str(caught.value)


def test_a_model_to_train_has_forgotten_them(tmp_path):
    """Checkpoints, and what is told to trackers, come from what is in memory."""
    recipe = toy_run(KNOCKING, tmp_path)
    for name in FILES[:2]:
        plant(Path(recipe.model.path, name))
    model = load_model(recipe, load_tokenizer(recipe))
    for config in (model.config, model.generation_config):
        assert PLANTED not in str(config.to_dict()) and config.to_dict()["kept"] == {"by": "us"}


def test_a_configuration_is_saved_without_tokens(tmp_path):
    config = mixed_config("Llama", {"knocking": {}})
    config.use_auth_token = PLANTED
    config.save_pretrained(tmp_path)
    assert PLANTED not in (tmp_path / "config.json").read_text() + str(config)
    assert json.loads((tmp_path / "config.json").read_text())["mixers"] == config.mixers
