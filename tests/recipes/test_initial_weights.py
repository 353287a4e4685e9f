"""A run is tied to the weights that it began with, not only to their path."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from crosshead.common.errors import RecipeError
from crosshead.recipes.trainer.loading import weights_identity
from toy_training import KNOCKING, MIXTURE, toy_run, train


@pytest.mark.parametrize(("name", "key"), [(KNOCKING, "model.path"), (MIXTURE, "distillation.teacher")])
def test_a_run_is_that_of_its_weights(name, key, tmp_path):
    """A run is not resumed if the weights of its model or teacher were replaced."""
    recipe = toy_run(name, tmp_path, steps=2)
    train(recipe)
    run = Path(recipe.output, "run.json")
    changed = Path(recipe.model.path if key == "model.path" else recipe.distillation.teacher, "model.safetensors")
    tensors = load_file(changed)
    save_file({part: tensor + 1 for part, tensor in tensors.items()}, changed, {"format": "pt"})
    with pytest.raises(RecipeError, match=f"weights of {re.escape(key)}"):
        train(recipe)
    recorded = json.loads(run.read_text())
    run.write_text(json.dumps({part: value for part, value in recorded.items() if not part.startswith("weights of")}))
    assert train(recipe).model  # earlier versions did not record the weights


def test_a_model_of_the_hub_is_its_commit():
    assert weights_identity("OWNER/MODEL", SimpleNamespace(_commit_hash="a1b2")) == "a1b2"
