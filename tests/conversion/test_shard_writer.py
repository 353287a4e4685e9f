from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import toys
from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import CHUNK
from crosshead.conversion.sources.safetensors_store import INDEX, WEIGHTS, SafetensorsStore
from crosshead.conversion.sources.tensor_store import DTYPE_NAMES, Entry
from crosshead.conversion.writing.shard_writer import (
    digest_of,
    is_intact,
    shard_size,
    tensor_chunks,
    write_index,
    write_shard,
)
from tiers import grid

NAMED = "tensor a"
TENSORS = {
    "norm": torch.randn(3).bfloat16(),
    "äß": torch.randn(5, 7),
    "long": torch.arange(CHUNK // 2 + 5).double() / 3,
    "transposed": torch.randn(6, 4).T,
    "half": torch.randn(1).half(),
    "scalar": torch.tensor(1.5),
    "empty": torch.ones(0, 4),
}


def items(tensors):
    return [
        (Entry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)), partial(tensor_chunks, tensor))
        for name, tensor in tensors.items()
    ]


def entries(tensors):
    return [entry for entry, _ in items(tensors)]


def test_written_shard_is_read_by_safetensors(tmp_path):
    digests = write_shard(tmp_path / WEIGHTS, items(TENSORS))
    loaded = load_file(tmp_path / WEIGHTS)
    assert loaded.keys() == digests.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].data_ptr() % tensor.itemsize == 0
    assert (tmp_path / WEIGHTS).stat().st_size == shard_size(entries(TENSORS))


def test_copied_shard_has_same_bytes_as_safetensors_file(tmp_path):
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / WEIGHTS, {"format": "pt"})
    store = SafetensorsStore(tmp_path)
    copied = [(store.entries[name], partial(store.chunks, name)) for name in store.shards[WEIGHTS]]
    digests = write_shard(tmp_path / "copy", copied)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / WEIGHTS).read_bytes()
    assert digests == {name: digest_of(store.chunks(name)) for name in store.entries}


@pytest.mark.oldest
def test_transformers_loads_shards(tmp_path):
    model = toys.stock_model("Qwen3")
    model.save_pretrained(tmp_path / "source")
    model.config.save_pretrained(tmp_path)
    state = load_file(tmp_path / "source" / WEIGHTS)
    names = sorted(state)
    parts = {
        "model-00001-of-00002.safetensors": {name: state[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: state[name] for name in names[1::2]},
    }
    for file, tensors in parts.items():
        write_shard(tmp_path / file, items(tensors))
    write_index(tmp_path, {file: entries(tensors) for file, tensors in parts.items()})
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert set(SafetensorsStore(tmp_path).entries) == set(names)


@pytest.mark.oldest
def test_written_index_equals_transformers_index(tmp_path):
    model = toys.stock_model("Llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = (tmp_path / INDEX).read_text()
    store = SafetensorsStore(tmp_path)
    write_index(tmp_path, {file: [store.entries[name] for name in names] for file, names in store.shards.items()})
    assert (tmp_path / INDEX).read_text() == theirs


@pytest.mark.parametrize(
    ("value", "dtype", "index"),
    grid([float("nan"), float("inf"), float("-inf")], DTYPE_NAMES, [0, CHUNK, -1], strength=1),
)
def test_nan_and_infinity_are_refused(tmp_path, value, dtype, index):
    tensor = torch.zeros(2 * CHUNK + 1, dtype=dtype)
    tensor[index] = value
    with pytest.raises(ConversionError, match=rf"'a\.weight'.*{value}"):
        write_shard(tmp_path / WEIGHTS, items({"a.weight": tensor}))


@pytest.mark.parametrize(("count", "message"), [(0, "0 bytes.*8"), (1, "4 bytes.*8"), (3, "8")])
def test_wrong_number_of_bytes_is_refused(tmp_path, count, message):
    broken = (Entry("a", "F32", (2,)), partial(tensor_chunks, torch.ones(count)))
    with pytest.raises(ConversionError, match=f"'a'.*{message}"):
        write_shard(tmp_path / WEIGHTS, [broken, *items(TENSORS)])


def test_tensors_are_produced_in_file_order(tmp_path):
    begun = []

    def produce(name, tensor):
        begun.append(name)
        yield from tensor_chunks(tensor)
        begun.append(name)

    tensors = {str(name): torch.ones(CHUNK * (name % 3) // 4 + 1) for name in range(12)}
    produced = [(entry, partial(produce, entry.name, tensors[entry.name])) for entry, _ in items(tensors)]
    write_shard(tmp_path / WEIGHTS, produced)
    assert begun == [name for name in tensors for _ in range(2)]


def test_producer_error_is_raised(tmp_path):
    def fail():
        yield from tensor_chunks(torch.ones(2))
        raise ConversionError(NAMED)

    with pytest.raises(ConversionError, match=NAMED):
        write_shard(tmp_path / WEIGHTS, [(Entry("a", "F32", (4,)), fail), *items(TENSORS)])


def test_is_intact_detects_changed_shards(tmp_path):
    file = tmp_path / WEIGHTS
    digests = write_shard(file, items(TENSORS))
    whole, expected = file.read_bytes(), entries(TENSORS)
    assert is_intact(file, expected, digests)
    assert not is_intact(file, expected, {**digests, "long": "00000000"})
    assert not is_intact(file, expected, {})
    assert not is_intact(file, expected[:-1], digests)
    for position in (20, len(whole) - 1, len(whole) // 2):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert not is_intact(file, expected, digests)
    for damaged in (whole[:-1], whole + b"\0", b""):
        file.write_bytes(damaged)
        assert not is_intact(file, expected, digests)
