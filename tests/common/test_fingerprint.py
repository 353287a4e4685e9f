"""The fingerprint of a model changes if a weight or the configuration changes, and only then."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosshead.common.errors import EvalError
from crosshead.common.fingerprint import SAMPLE, model_fingerprint


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"vocab_size": 8}')
    save_file({"large": torch.zeros(SAMPLE), "scalar": torch.tensor(0.5)}, path / "model.safetensors")
    return path


def test_a_copy_has_the_same_one(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("a card")
    assert model_fingerprint(copy) == model_fingerprint(folder)


@pytest.mark.parametrize("changed", ["large", "scalar"])
def test_every_tensor_counts(folder, changed):
    before = model_fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[changed] += 1
    save_file(tensors, folder / "model.safetensors")
    assert model_fingerprint(folder) != before


def test_the_configuration_counts(folder):
    before = model_fingerprint(folder)
    (folder / "config.json").write_text('{"vocab_size": 9}')
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b'\x0a\0\0\0\0\0\0\0{"a": "b"}'])
def test_a_damaged_file_is_named(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(EvalError, match=r"model\.safetensors"):
        model_fingerprint(folder)
