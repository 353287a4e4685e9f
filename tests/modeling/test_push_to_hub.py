"""`push_to_hub` of models and configurations uploads the two code files, with and without crosshead."""

import pytest
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import toys
from crosshead.modeling.bundle import code_files
from hub_client import own_hub
from hub_server import Repository

TOKEN = "hf_secretsecretsecret"
CODE = ("configuration_crosshead.py", "modeling_crosshead.py")


@pytest.fixture
def hub(monkeypatch):
    with own_hub(monkeypatch, TOKEN) as running:
        yield running


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
@pytest.mark.parametrize("part", ["model", "config"])
def test_code_files_are_uploaded(tmp_path, hub, part, by):
    model = toys.mixed_model("Llama", {"knocking": {}})
    pushed = model if part == "model" else model.config
    if by == "push_to_hub":
        pushed.push_to_hub("org/mine")
    else:
        pushed.save_pretrained(str(tmp_path / "mine"), push_to_hub=True, repo_id="org/mine")
    repository: Repository = hub.repositories["org/mine"]
    assert {name: repository.files[name].decode() for name in CODE} == code_files(model.config)
    assert "config.json" in repository.files and ("model.safetensors" in repository.files) == (part == "model")


def test_downloaded_configuration_is_uploaded_with_its_code(tmp_path, hub):
    """The configuration class of a saved model, which runs without crosshead's package."""
    model = toys.mixed_model("Llama", {"knocking": {}})
    saved = tmp_path / "pushed_configuration"
    model.config.save_pretrained(saved)
    config = get_class_from_dynamic_module(model.config.auto_map["AutoConfig"], saved).from_pretrained(saved)
    assert not type(config).__module__.startswith("crosshead.")
    config.save_pretrained(str(tmp_path / "again"), push_to_hub=True, repo_id="org/again")
    files = hub.repositories["org/again"].files
    assert {name: files[name] for name in CODE} == {name: (saved / name).read_bytes() for name in CODE}
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"config.json", *CODE}
