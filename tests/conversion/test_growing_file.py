"""A safetensors file that is written while its tensors are computed."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from crosshead.common.errors import ConversionError
from crosshead.conversion.writing.shard_writer import MAX_METADATA, write_streamed

GROUPS = [
    {"0.gram": torch.rand(2, 3, 5, dtype=torch.float64), "0.change": torch.rand(4, 6)},
    {"1.gram": torch.rand(1, 1, 1, dtype=torch.float64), "1.none": torch.zeros(0, 3)},
    {f"2.{index}": torch.full((2,), float(index)) for index in range(400)},
]


def test_streamed_file_contains_all_tensors_and_metadata(tmp_path):
    path = tmp_path / "grown.safetensors"
    tensors = {name: tensor for group in GROUPS for name, tensor in group.items()}
    write_streamed(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, GROUPS, {"made_for": "x"})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[name].equal(tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in tensors)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"made_for": "x"}


def test_error_while_streaming_leaves_unreadable_file(tmp_path):
    path = tmp_path / "grown.safetensors"

    def groups():
        yield GROUPS[0]
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_streamed(path, dict.fromkeys(GROUPS[0], ()), groups(), {})
    with pytest.raises(Exception, match="header"):
        load_file(path)


def test_header_larger_than_its_reserved_space_is_refused(tmp_path):
    path = tmp_path / "grown.safetensors"
    with pytest.raises(ConversionError, match=r"grown\.safetensors needs \d+ bytes .* reserved"):
        write_streamed(path, {"a": (2,)}, [{"a": torch.ones(2)}], {"made_for": "x" * 2 * MAX_METADATA})
    with pytest.raises(Exception, match="header"):
        load_file(path)
