"""Integer buffers in a checkpoint, such as position ids, are copied unchanged."""

import torch
from safetensors.torch import load_file, save_file

import crosshead
from crosshead.conversion.sources.safetensors_store import WEIGHTS, SafetensorsStore
from crosshead.conversion.sources.tensor_store import stored_dtype
from toy_checkpoints import write_stock

BUFFERS = {
    "model.position_ids": torch.arange(64)[None],
    "model.layers.0.self_attn.masked": torch.ones(3, 3, dtype=torch.bool).tril(),
    "model.layers.1.mlp.order": torch.arange(5, dtype=torch.uint8),
}


def assert_same_buffers(folder):
    stored = load_file(folder / WEIGHTS)
    for name, tensor in BUFFERS.items():
        assert stored[name].dtype == tensor.dtype and stored[name].equal(tensor), name


def test_integer_buffers_are_unchanged_by_convert_and_fold(tmp_path):
    source = write_stock(tmp_path / "source")
    save_file(load_file(source / WEIGHTS) | BUFFERS, source / WEIGHTS, {"format": "pt"})
    mixers = {"explicit": {"key_heads": 1, "method": "svd"}}
    report = crosshead.convert(source, tmp_path / "made", mixers, dtype="bfloat16", vocab_size=70)
    assert {report["tensors"][name]["fate"] for name in BUFFERS} == {"copied"}
    assert report["dropped"] == {}
    assert_same_buffers(tmp_path / "made")
    assert report["verification"]["reload"]["tensors"]["unexpected"] == 0
    crosshead.fold(tmp_path / "made", tmp_path / "back")
    assert_same_buffers(tmp_path / "back")


def test_stored_dtype_is_that_of_the_largest_tensor_without_integers(tmp_path):
    tensors = {"small": torch.ones(3), "large": torch.ones(9).half(), "ids": torch.arange(100)}
    save_file(tensors, tmp_path / WEIGHTS)
    assert stored_dtype(SafetensorsStore(tmp_path)) == torch.float16
