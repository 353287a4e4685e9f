"""Model names: short labels, and `name@revision` of the Hub in conversions, evaluations and recipes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import toys
from crosshead.common.errors import EvalError, RecipeError
from crosshead.common.model_location import model_label, pretrained_arguments, split_revision
from crosshead.evals.open_model import load_model, open_config, open_model
from crosshead.recipes.schema.recipe import Recipe
from crosshead.recipes.schema.sections import Distillation
from crosshead.recipes.trainer import models
from crosshead.recipes.trainer.loading import initial_config, load_pretrained, load_tokenizer
from crosshead_command.card_source import origin_of
from hub_client import hub_with
from hub_server import Repository
from toy_checkpoints import write_stock
from toy_eval import write_scorable
from toy_training import KNOCKING, toy_run


def test_model_labels_of_folders_and_hub_names(tmp_path):
    for folder in ("runs/first/model", "runs/second/model", "models/mine"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/first/model/training.json").touch()
    assert model_label(str(tmp_path / "runs/first/model")) == "first"
    assert model_label(str(tmp_path / "runs/second/model")) == "model"
    assert model_label(str(tmp_path / "models/mine")) == "mine"
    assert model_label("org/model") == "org/model"


def test_home_of_unknown_user_is_refused():
    name = "~nobody-has-this-name/model"
    assert model_label(name) == name
    with pytest.raises(EvalError, match=name):
        open_model(name)
    with pytest.raises(ValueError, match=name):
        origin_of({}, name)


def test_adapter_without_its_model_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(EvalError, match=f"{tmp_path} is an adapter of peft.*merge_and_unload"):
        open_model(str(tmp_path))


FIRST, NEWEST = "a" * 40, "b" * 40
MODEL = "org/toy@v1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state dict and the files of the first and of the newest commit."""
    commits = []
    for seed in (1, 2):
        model = toys.lopsided(toys.stock_model("Llama"), seed)
        folder = write_scorable(model, tmp_path_factory.mktemp("model"))
        (folder / "LICENSE").write_text(f"licence {seed}")
        commits.append((model.state_dict(), {file.name: file.read_bytes() for file in folder.iterdir()}))
    return commits


@pytest.fixture
def hub(saved, monkeypatch, tmp_path):
    (_, first), (_, newest) = saved
    repository = Repository(newest, commit=NEWEST, older={FIRST: first}, tags={"v1": FIRST})
    with hub_with(monkeypatch, {"org/toy": repository}, tmp_path / "cache") as running:
        yield running


def assert_equal(model: Any, weights: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/toy", ("org/toy", None)),
        ("org/toy@v1", ("org/toy", "v1")),
        ("org/toy@refs/pr/3", ("org/toy", "refs/pr/3")),
        ("toy@v1", ("toy", "v1")),
        ("org/toy@", ("org/toy@", None)),
        ("@v1", ("@v1", None)),
        ("", ("", None)),
    ],
)
def test_split_revision(name, parts):
    assert split_revision(name) == parts


def test_existing_folder_with_at_sign_has_no_revision(tmp_path):
    folder = tmp_path / "toy@v1"
    folder.mkdir()
    assert pretrained_arguments(str(folder)) == {"pretrained_model_name_or_path": str(folder)}


def test_evaluation_loads_the_revision(hub, saved):
    for name, (weights, _) in zip((MODEL, "org/toy"), saved, strict=True):
        opened = open_model(name)
        assert opened.label == name
        assert_equal(load_model(opened, dtype=torch.float32, device_map=None), weights)
    with pytest.raises(EvalError, match="org/toy@v2"):
        open_model("org/toy@v2")


def recipe(folder: Any, name: str) -> Recipe:
    return toy_run(KNOCKING, folder, model={"path": name, "config": None, "tokenizer": None})


def test_recipe_loads_the_revision(hub, saved, tmp_path):
    for name, (weights, files) in zip((MODEL, "org/toy"), saved, strict=True):
        trained = recipe(tmp_path, name)
        tokenizer = load_tokenizer(trained)
        assert initial_config(trained).vocab_size == toys.stock_config("Llama").vocab_size
        assert_equal(models.load_model(trained, tokenizer), weights)
        distilled = replace(trained, distillation=Distillation(teacher=name))
        assert_equal(models.load_teacher(distilled, 61, tokenizer), weights)
        assert [path.read_bytes() for path in models.copied_files(trained.model)] == [files["LICENSE"]]
    missing = recipe(tmp_path, "org/toy@v2")
    with pytest.raises(RecipeError, match=r"model\.path=org/toy@v2 is not a folder"):
        load_tokenizer(missing)


def test_damaged_weights_file_is_named(tmp_path):
    folder = write_stock(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    message = f"{weights} is damaged or truncated \\(.*\\): download it again"
    with pytest.raises(EvalError, match=message):
        load_model(open_config(str(folder)))
    with pytest.raises(RecipeError, match=message):
        load_pretrained(AutoModelForCausalLM, "model.path", str(folder))
