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
def test_resume_with_changed_initial_weights_is_refused(name, key, tmp_path):
    """The weights are those of the model or of the teacher."""
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


def test_identity_of_hub_model_is_its_commit_hash():
    assert weights_identity("OWNER/MODEL", SimpleNamespace(_commit_hash="a1b2")) == "a1b2"
