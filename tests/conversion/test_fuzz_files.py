"""Damaged weight files and indexes: one clear line, or the right tensors; never anything else."""

import json
import random
import resource
import string
import tracemalloc

import pytest
import torch
from safetensors.torch import save

from crosshead.common.errors import ConversionError
from crosshead.conversion.sources.safetensors_store import INDEX, WEIGHTS, SafetensorsStore

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3),
    "model.norm.weight": torch.arange(5).bfloat16(),
    "lm_head.weight": torch.arange(6).reshape(2, 3).half(),
    "scale": torch.tensor(3.0).double(),
}
SHARDS = {
    "model-00001-of-00002.safetensors": ["model.embed_tokens.weight", "scale"],
    "model-00002-of-00002.safetensors": ["model.norm.weight", "lm_head.weight"],
}
ODD = [
    None, True, False, 0, 1, -1, 2, 3, 8, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**300, -(10**18),
    0.5, 1e18, 1e308, "", "F32", "F8_E4M3", "I8", "BF16", "0", "a\nb", "\0", "\ud800", "../x.safetensors", "/dev/zero",
    "x" * 10_000, "model-00002-of-00002.safetensors", "__metadata__", ".", [], {}, [[]], [0], [0, 0], [0, 48], [4, 3],
    [10**18], [2**40, 2**40], [1] * 100, [0, 10**18], {"a": 1}, {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
]  # fmt: skip
RAW = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"9" * 5000, b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"\0",
    b"[" * 300 + b"]" * 300, b'"\\ud800"', b"{}", b"null", b",", b'"', b"}", b"\n", b"\xef\xbb\xbf",
]  # fmt: skip
ROUNDS = 2000


def with_length_prefix(header):
    return len(header).to_bytes(8, "little") + header


def split_header(file):
    size = int.from_bytes(file[:8], "little")
    return file[8 : 8 + size], file[8 + size :]


def flip_bit(chance, raw):
    position = chance.randrange(len(raw))
    return raw[:position] + bytes([raw[position] ^ 1 << chance.randrange(8)]) + raw[position + 1 :]


def truncate(chance, raw):
    return raw[: chance.randrange(len(raw))]


def insert_bytes(chance, raw):
    position = chance.randrange(len(raw))
    extra = chance.choice([chance.randbytes(chance.randint(1, 9)), *RAW])
    return raw[:position] + extra + raw[position + chance.choice([0, 0, 1, len(extra)]) :]


def repeat_slice(chance, raw):
    """Return `raw` with a slice repeated, which can duplicate keys."""
    begin, end = sorted(chance.randrange(len(raw)) for _ in range(2))
    return raw[:end] + raw[begin:end] + raw[end:]


def json_entries(value):
    """Yield each container in a JSON document with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from json_entries(value[key])


def change_json(chance, raw):
    """Replace, rename, increment or remove one or two entries of a JSON document."""
    content = json.loads(raw)
    for _ in range(chance.choice([1, 1, 2])):
        holder, key = chance.choice(list(json_entries(content)) or [({"": 0}, "")])
        odd = chance.choice(ODD)
        kind = chance.randrange(5)
        if kind == 0 and isinstance(holder, dict):
            holder[odd if isinstance(odd, str) else "".join(chance.choices(string.printable, k=5))] = holder.pop(key)
        elif kind == 1:
            del holder[key]
        elif kind == 2 and type(holder[key]) is int:
            holder[key] += chance.choice([-1, 1, 2, -8, 8, 10**18])
        else:
            holder[key] = odd
    return json.dumps(content).encode()


MUTATIONS = (flip_bit, truncate, insert_bytes, repeat_slice, change_json, change_json, change_json)


def damage(chance, raw):
    for _ in range(chance.choice([1, 1, 1, 2])):
        if raw:
            try:
                raw = chance.choice(MUTATIONS)(chance, raw)
            except (ValueError, KeyError, RecursionError):  # no longer JSON, or the same entry changed twice
                raw = flip_bit(chance, raw)
    return raw


def damaged_file(chance, file):
    """Return a file with a damaged header of the stated length, or with damage anywhere in the first bytes."""
    header, data = split_header(file)
    if chance.random() < 0.7:
        return with_length_prefix(damage(chance, header)) + data
    return chance.choice([flip_bit, truncate, insert_bytes, repeat_slice])(chance, file[: 8 + len(header) + 40])


def load_and_check(folder):
    """Return the store's error message, or None if it loads; then the tensors must match the bytes of the file."""
    try:
        store = SafetensorsStore(folder)
        tensors = {name: store.read(name) for name in store.entries}
        raw = {name: b"".join(map(bytes, store.chunks(name))) for name in store.entries}
        store.fingerprint()
    except ConversionError as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) < 500
        return message
    # A damaged name or dtype can still describe the same bytes; only their number and order must be right.
    assert all(tensor.flatten().view(torch.uint8).numpy().tobytes() == raw[name] for name, tensor in tensors.items())
    for file, names in store.shards.items():
        assert b"".join(raw[name] for name in names) == split_header((folder / file).read_bytes())[1]
    return None


def check_many_damages(folder, damage_once):
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    messages = [damage_once(folder) for _ in range(ROUNDS // 2)]
    assert messages.count(None) < len(messages) / 2
    assert len({message.split(":")[-1] for message in messages if message}) > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # kB


def test_damaged_headers_give_one_line_error_or_right_tensors(tmp_path):
    chance, whole = random.Random(7), save(TENSORS, {"format": "pt"})

    def once(folder):
        (folder / WEIGHTS).write_bytes(damaged_file(chance, whole))
        return load_and_check(folder)

    check_many_damages(tmp_path, once)


def test_damaged_indexes_and_shards_give_error_or_right_tensors(tmp_path):
    chance = random.Random(8)
    whole = {file: save({name: TENSORS[name] for name in names}) for file, names in SHARDS.items()}
    index = {"metadata": {}, "weight_map": {name: file for file, names in SHARDS.items() for name in names}}
    whole[INDEX] = json.dumps(index, indent=2, sort_keys=True).encode()
    for file, content in whole.items():
        (tmp_path / file).write_bytes(content)
    assert load_and_check(tmp_path) is None

    def once(folder):
        file = chance.choice([INDEX, INDEX, *SHARDS])
        content = damage(chance, whole[file]) if file == INDEX else damaged_file(chance, whole[file])
        (folder / file).write_bytes(content)
        message = load_and_check(folder)
        (folder / file).write_bytes(whole[file])
        return message

    check_many_damages(tmp_path, once)


@pytest.mark.parametrize("shape", [[10**18], [2**31, 2**31], [1 << 40], [1 << 28]])
def test_header_with_huge_shape_is_refused_without_allocating_it(tmp_path, shape, monkeypatch):
    header = {"a": {"dtype": "F16", "shape": shape, "data_offsets": [0, 2 * torch.Size(shape).numel()]}}
    (tmp_path / WEIGHTS).write_bytes(with_length_prefix(json.dumps(header).encode()) + bytes(64))
    monkeypatch.setattr(SafetensorsStore, "read", pytest.fail)  # allocates a tensor, which tracemalloc does not see
    tracemalloc.start()
    try:
        message = load_and_check(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "'a'" in message or WEIGHTS in message
    assert peak < 1_000_000
