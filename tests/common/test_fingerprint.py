"""The fingerprint of a model changes if a weight or the configuration changes, and only then."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosshead.common.errors import EvalError
from crosshead.common.fingerprint import SAMPLE, model_fingerprint


@pytest.fixture
def model_folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"vocab_size": 8}')
    save_file({"large": torch.zeros(SAMPLE), "scalar": torch.tensor(0.5)}, path / "model.safetensors")
    return path


def test_copied_model_has_same_fingerprint(model_folder, tmp_path):
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    (copy / "README.md").write_text("a card")
    assert model_fingerprint(copy) == model_fingerprint(model_folder)


@pytest.mark.parametrize("changed", ["large", "scalar"])
def test_changed_tensor_changes_fingerprint(model_folder, changed):
    before = model_fingerprint(model_folder)
    tensors = load_file(model_folder / "model.safetensors")
    tensors[changed] += 1
    save_file(tensors, model_folder / "model.safetensors")
    assert model_fingerprint(model_folder) != before


def test_changed_config_changes_fingerprint(model_folder):
    before = model_fingerprint(model_folder)
    (model_folder / "config.json").write_text('{"vocab_size": 9}')
    assert model_fingerprint(model_folder) != before


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b'\x0a\0\0\0\0\0\0\0{"a": "b"}'])
def test_error_names_damaged_safetensors_file(model_folder, content):
    (model_folder / "model.safetensors").write_bytes(content)
    with pytest.raises(EvalError, match=r"model\.safetensors"):
        model_fingerprint(model_folder)
