"""`crosshead train` with `hub` pushes the model; if the push fails, the same command repeats only the push."""

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load as load_tensors

from broken import run
from hub_client import own_hub
from hub_server import Repository
from toy_training import KNOCKING, toy_run
from training_sessions import without_nothing

TOKEN = "hf_secretsecretsecret"
NAME = "org/model"


@pytest.fixture
def recipe_file(tmp_path):
    """The file of a recipe of three steps with `hub`."""
    path = tmp_path / "recipe.yaml"
    content = asdict(toy_run(KNOCKING, tmp_path, 3)) | {"hub": {"repo": NAME}}
    path.write_text(yaml.safe_dump(without_nothing(content)))
    return path


def test_failed_push_is_repeated_by_same_command(recipe_file, tmp_path, monkeypatch, capfd):
    model = tmp_path / "run" / "model"
    refusing = Repository({}, private=True, refused="commit")
    with own_hub(monkeypatch, TOKEN) as hub:
        hub.repositories[NAME] = refusing
        status, out, err = run(capfd, monkeypatch, f"train {recipe_file} --debug")
        assert status == 1 and out.endswith(f"wrote {model}\n")
        message = err.splitlines()[-1]
        assert message.startswith("crosshead: error: ") and all(word in message for word in (str(model), NAME, "403"))
        before = {path.name: path.read_bytes() for path in model.iterdir()}
        refusing.refused = ""
        printed = out + err
        status, out, err = run(capfd, monkeypatch, f"train {recipe_file}")
        assert (status, out.splitlines()[-2:]) == (
            0,
            [f"pushed to {hub.address}/{NAME}", f"tagged v{version('crosshead')}"],
        )
        assert hub.tokens == {TOKEN} and TOKEN not in printed + out + err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before == refusing.files
    assert {"README.md", "config.json", "tokenizer.json", "modeling_crosshead.py", "training.json"} <= set(before)
    assert load_tensors(refusing.files["model.safetensors"]) and refusing.private
    for path in Path(tmp_path).rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
