import json
import os
import re
from itertools import zip_longest

import pytest
import torch
from safetensors.torch import save_file

from crosshead.common.errors import ConversionError
from crosshead.conversion.sources.safetensors_store import INDEX, WEIGHTS, SafetensorsStore

A, B, C = torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2, 3, 4).half()


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def tensor_info(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_sharded(folder):
    save_file({"a": A, "b": B}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": C}, folder / "model-00002-of-00002.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(folder, {"a": first, "b": first, "c": second})


def write_index(folder, files):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))


def check_reads(store, tensors):
    assert set(store.entries) == set(tensors)
    for name, tensor in tensors.items():
        result = store.read(name)
        assert result.dtype == tensor.dtype
        assert torch.equal(result, tensor)
        raw = b"".join(bytes(chunk) for chunk in store.chunks(name))
        assert raw == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def refusal(folder):
    with pytest.raises(ConversionError) as caught:
        SafetensorsStore(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_single_file_is_read(tmp_path):
    tensors = {
        "a": A,
        "b": B,
        "c": C,
        "d": torch.randn(2).double(),
        "scalar": torch.tensor(2.0),
        "no": torch.ones(0, 3),
    }
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    check_reads(SafetensorsStore(tmp_path), tensors)


def test_shards_are_read_in_order(tmp_path):
    write_sharded(tmp_path)
    store = SafetensorsStore(tmp_path)
    check_reads(store, {"a": A, "b": B, "c": C})
    assert store.shards == {
        "model-00001-of-00002.safetensors": ["a", "b"],
        "model-00002-of-00002.safetensors": ["c"],
    }
    assert store.entries["c"].size == 48


def test_single_file_is_preferred_to_shards(tmp_path):
    write_sharded(tmp_path)
    save_file({"single": A}, tmp_path / WEIGHTS)
    check_reads(SafetensorsStore(tmp_path), {"single": A})


def test_symlinks_of_hub_cache_are_read(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_sharded(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    check_reads(SafetensorsStore(snapshot), {"a": A, "b": B, "c": C})


def test_interleaved_chunk_iterators_give_right_bytes(tmp_path):
    tensors = {"a": torch.arange(2.0**20).reshape(4, -1), "b": torch.arange(700_001.0)}
    save_file(tensors, tmp_path / WEIGHTS)
    store = SafetensorsStore(tmp_path)
    first, second = b"", b""
    for one, other in zip_longest(store.chunks("a"), store.chunks("b"), fillvalue=b""):
        first, second = first + bytes(one), second + bytes(other)
    assert first == tensors["a"].numpy().tobytes()
    assert second == tensors["b"].numpy().tobytes()
    check_reads(store, tensors)


def test_read_returns_independent_copy(tmp_path):
    save_file({"a": A}, tmp_path / WEIGHTS)
    store = SafetensorsStore(tmp_path)
    store.read("a").zero_()
    assert torch.equal(store.read("a"), A)


def test_fingerprint_changes_with_shard_content(tmp_path):
    write_sharded(tmp_path)
    before = SafetensorsStore(tmp_path).fingerprint()
    assert SafetensorsStore(tmp_path).fingerprint() == before
    save_file({"c": C + 1}, tmp_path / "model-00002-of-00002.safetensors")
    assert SafetensorsStore(tmp_path).fingerprint() != before


def test_truncation_after_opening_is_reported(tmp_path):
    save_file({"a": A}, tmp_path / WEIGHTS)
    store = SafetensorsStore(tmp_path)
    os.truncate(tmp_path / WEIGHTS, 100)
    with pytest.raises(ConversionError, match="byte 100"):
        store.read("a")
    with pytest.raises(ConversionError, match="byte 100"):
        list(store.chunks("a"))


OTHER = tensor_info(offsets=(8, 16))
BROKEN_FILES = {
    "empty file": (b"", None, "0 bytes"),
    "absurd header": ((10**17).to_bytes(8, "little"), None, "100000000000000000 bytes"),
    "header cut off": ((500).to_bytes(8, "little") + b"{", None, "9 bytes.*508"),
    "not JSON": (b"{]", 0, "JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "JSON"),
    "not an object": ([1], 0, r"\[1\]"),
    "key twice": (b'{"a": 1, "a": 2}', 0, "'a'"),
    "inner key twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', 0, "'dtype'"),
    "deep nesting": (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 0, "nested|JSON"),
    "thousands of digits": (b'{"a": ' + b"9" * 10_000 + b"}", 0, "JSON"),
    "NaN": (b'{"a": NaN}', 0, "NaN"),
    "Infinity": (b'{"a": -Infinity}', 0, "-Infinity"),
    "no tensors": ({"__metadata__": {}}, 0, "no tensors"),
    "bad metadata": ({"__metadata__": {"a": 1}, "a": tensor_info()}, 8, "__metadata__="),
    "bad name": ({"a\nb": tensor_info()}, 8, r"'a\\nb'"),
    "lone surrogate": (b'{"\\ud800": {}}', 8, "name"),
    "no description": ({"a": 3}, 0, "'a'.*3"),
    "fp8": ({"a": tensor_info("F8_E4M3")}, 8, "'a'.*dtype='F8_E4M3'"),
    "sub-byte integers": ({"a": tensor_info("I4")}, 8, "'a'.*dtype='I4'"),
    "dtype list": ({"a": tensor_info([])}, 8, r"'a'.*dtype=\[\]"),
    "negative shape": ({"a": tensor_info(shape=(-2,))}, 8, r"shape=\[-2\]"),
    "boolean shape": ({"a": tensor_info(shape=(2, True))}, 8, r"shape=\[2, True\]"),
    "float shape": ({"a": tensor_info(shape=(2.0,))}, 8, r"shape=\[2.0\]"),
    "endless shape": ({"a": tensor_info(shape=(10**400,))}, 8, "shape="),
    "giant shape": ({"a": tensor_info(shape=(10**10, 10**10))}, 8, "10000000000, 10000000000"),
    "giant empty shape": ({"a": tensor_info(shape=(0, 2**62), offsets=(0, 0))}, 0, str(2**62)),
    "many dimensions": ({"a": tensor_info(shape=[1] * 65 + [2])}, 8, "shape="),
    "18 zeros": ({"a": tensor_info(shape=(10**18,), offsets=(0, 4 * 10**18))}, 8, "4000000000000000"),
    "one offset": ({"a": tensor_info(offsets=(0,))}, 8, "data_offsets="),
    "negative offset": ({"a": tensor_info(offsets=(-8, 0))}, 8, "data_offsets="),
    "backwards": ({"a": tensor_info(offsets=(8, 0))}, 8, r"data_offsets=\[8, 0\]"),
    "wrong size": ({"a": tensor_info(offsets=(0, 12))}, 12, r"shape=\[2\] in F32 needs 8 bytes"),
    "hole": ({"a": tensor_info(), "b": tensor_info(offsets=(16, 24))}, 24, "'b'.* 16 .* 8:"),
    "late start": ({"b": OTHER}, 16, "'b'.* 8 .* 0:"),
    "overlap": ({"a": tensor_info(), "b": tensor_info(offsets=(4, 12))}, 12, "'b'.* 4 .* 8:"),
    "cut off": ({"a": tensor_info(), "b": OTHER}, 10, "141 bytes.*147"),
    "too long": ({"a": tensor_info(), "b": OTHER}, 20, "151 bytes.*147"),
}


@pytest.mark.parametrize(("header", "data", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_broken_file_is_refused(tmp_path, header, data, message):
    if data is None:
        (tmp_path / WEIGHTS).write_bytes(header)
    else:
        write(tmp_path / WEIGHTS, header, b"\0" * data)
    error = refusal(tmp_path)
    assert re.search(message, error), error
    assert str(tmp_path / WEIGHTS) in error


FIRST = "model-00001-of-00002.safetensors"
BROKEN_INDEXES = {
    "not JSON": ("{", "JSON"),
    "a list": ([], r"\[\]"),
    "no map": ({"metadata": {}}, "weight_map=None"),
    "empty map": ({"weight_map": {}}, r"weight_map=\{\}"),
    "map of numbers": ({"weight_map": {"a": 1}}, "'a' in 1"),
    "missing file": ({"weight_map": {"a": "model-3.safetensors"}}, "model-3.safetensors"),
    "upwards": ({"weight_map": {"a": f"../{FIRST}"}}, f"'../{FIRST}'"),
    "absolute": ({"weight_map": {"a": f"/{FIRST}"}}, f"'/{FIRST}'"),
    "subfolder": ({"weight_map": {"a": f"sub/{FIRST}"}}, f"'sub/{FIRST}'"),
    "dots": ({"weight_map": {"a": ".."}}, r"'a' in '\.\.'"),
    "zero byte": ({"weight_map": {"a": "a\0.safetensors"}}, r"a\\x00\.safetensors"),
    "endless name": ({"weight_map": {"a": "x" * 5000 + ".safetensors"}}, "'a' in 'xxx"),
    "pickle": ({"weight_map": {"a": "pytorch_model.bin"}}, r"'pytorch_model\.bin'"),
    "lacks one": ({"weight_map": {"a": FIRST, "b": FIRST, "z": FIRST}}, "'z' in 'model-00001"),
    "unlisted": ({"weight_map": {"a": FIRST}}, "'b'"),
    "elsewhere": ({"weight_map": {"a": FIRST, "b": FIRST, "c": FIRST}}, "'c' in "),
}


@pytest.mark.parametrize(("content", "message"), BROKEN_INDEXES.values(), ids=BROKEN_INDEXES)
def test_broken_index_is_refused(tmp_path, content, message):
    write_sharded(tmp_path)
    (tmp_path / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
    error = refusal(tmp_path)
    assert re.search(message, error), error


def test_tensor_in_two_shards_is_refused(tmp_path):
    write_sharded(tmp_path)
    save_file({"a": A, "c": C}, tmp_path / "model-00002-of-00002.safetensors")
    assert re.search("'a'.*'model-00001", refusal(tmp_path))


def test_shards_without_index_are_refused(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert refusal(tmp_path).endswith(
        f"has model-00001-of-00002.safetensors, but no {INDEX}: copy the index of its shards, too"
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickle_checkpoints_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert re.search(f"pickle.*'{name}'", refusal(tmp_path))


def test_missing_or_irregular_weight_file_is_refused(tmp_path):
    assert WEIGHTS in refusal(tmp_path)
    assert "No such file or directory" in refusal(tmp_path / "absent")
    (tmp_path / WEIGHTS).mkdir()
    assert "not a file" in refusal(tmp_path)
    (tmp_path / WEIGHTS).rmdir()
    os.mkfifo(tmp_path / WEIGHTS)
    assert "not a file" in refusal(tmp_path)
    assert "Not a directory" in refusal(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).symlink_to("gone")
    assert "No such file or directory" in refusal(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(tmp_path):
    save_file({"a": A}, tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).chmod(0)
    assert "Permission denied" in refusal(tmp_path)
