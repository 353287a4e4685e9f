"""Random damage to configs, indexes and headers: a conversion succeeds, or fails in one line without any files."""

import json
import logging
import random
import shutil
import struct

import pytest

import crosshead
from broken import INDEX, no_hang
from crosshead.common.errors import ConversionError
from tiers import first
from toy_checkpoints import MANY_SHARDS, write_stock

CHANGES = 250

MIXERS = ({"knocking": {}}, {"explicit": {}}, {"mixture": {"active_heads": "100%"}}, {"talking": {"layers": [1]}})
VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        3,
        7,
        24,
        61,
        10**9,
        2**31,
        2**63,
        10**30,
        0.5,
        -0.0,
        1e308,
        1e400,
        "",
        "2",
        "x",
    ),
    *(
        "full_attention",
        "sliding_attention",
        "F64",
        "BF16",
        "I8",
        "F4",
        "llama",
        "qwen3_moe",
        "bfloat16",
        "../x",
        "/x",
    ),
    *(
        [],
        [0],
        [1, 2],
        [[]],
        ["x"],
        {},
        {"": 0},
        {"a": {}},
        {"rope_type": "linear"},
        {"rope_type": "yarn", "factor": 0},
    ),
    *([0, 2**63], [-1, 5], [2**40, 2**40], "\x00", "a\nb", "\ud800", "model.safetensors", "x" * 5000),
]
NAMES = [
    "mixers",
    "layouts",
    "to_dict",
    "auto_map",
    "architectures",
    "num_labels",
    "layer_types",
    "quantization_config",
]
NAMES += [
    "__class__",
    "__dict__",
    "attribute_map",
    "head_dim",
    "sliding_window",
    "rope_scaling",
    "rope_theta",
    "x",
    "",
]
NAMES += ["dtype", "torch_dtype", "id2label", "num_experts", "num_local_experts", "decoder_sparse_step", "sub_configs"]
NAMES += ["_attn_implementation", "attn_implementation", "use_sliding_window", "tie_word_embeddings", "problem_type"]


def json_paths(content, path=()):
    """Yield the path of every key and index in a JSON document."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield (*path, key)
        yield from json_paths(value, (*path, key))


def change_value(content, chance):
    """Change, add or remove one or two values of a JSON document in place, and return it."""
    for _ in range(chance.choice((1, 1, 2))):
        path = chance.choice([(), *json_paths(content)])
        holder = content
        for key in path[:-1]:
            holder = holder[key]
        if path and chance.random() < 0.2:
            del holder[path[-1]]
        elif path and type(holder[path[-1]]) is int and chance.random() < 0.4:
            holder[path[-1]] += chance.choice((-1, 1, 8, 10**6))
        elif path:
            holder[path[-1]] = chance.choice(VALUES)
        else:
            content[chance.choice(NAMES)] = chance.choice(VALUES)
    return content


def change_bytes(raw, chance):
    """Return `raw` with a few bytes overwritten, removed or inserted."""
    raw = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        position = chance.randrange(len(raw) + 1)
        new = bytes(chance.choice(b'{}[]",:0-9e.\\\x00\xff\x80 n') for _ in range(chance.randint(0, 3)))
        raw[position : position + chance.randint(0, 3)] = new
    return bytes(raw[: chance.randrange(len(raw) + 1)] if chance.random() < 0.1 else raw)


def damage_json(raw, chance):
    """Return a JSON document with changed values or bytes."""
    if chance.random() < 0.3:
        return change_bytes(raw, chance)
    return json.dumps(change_value(json.loads(raw), chance)).encode()


def damage_header(raw, chance):
    """Return a safetensors file with a changed header, mostly with a matching length field."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = damage_json(raw[8 : 8 + length], chance)
    stated = len(header) if chance.random() < 0.9 else chance.choice((0, 1, length, 2**31, 2**63, 2**64 - 1))
    return struct.pack("<Q", stated) + header + raw[8 + length :]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {
        "Llama": write_stock(folder / "Llama"),
        "sharded": write_stock(folder / "sharded", "Qwen2", MANY_SHARDS, tie_word_embeddings=True),
        "Qwen3": write_stock(folder / "Qwen3", "Qwen3"),
        "Qwen3Moe": write_stock(folder / "Qwen3Moe", "Qwen3Moe"),
    }
    return {name: {file.name: file.read_bytes() for file in path.iterdir()} for name, path in made.items()}


def file_names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("seed", first(range(8)))
def test_random_damage_converts_or_gives_one_line_error(seed, checkpoints, tmp_path, caplog):
    # The library may log what it reads; pytest's workers cannot report half a surrogate pair.
    caplog.set_level(logging.CRITICAL + 1, "transformers")
    chance = random.Random(seed)
    refused = 0
    for _ in range(CHANGES):
        files = checkpoints[chance.choice(list(checkpoints))]
        source, out = tmp_path / "source", tmp_path / "out"
        source.mkdir()
        for file, raw in files.items():
            (source / file).write_bytes(raw)
        victims = [file for file in files if file in ("config.json", INDEX) or file.endswith(".safetensors")]
        victim = chance.choice(["config.json", *victims])
        damage = damage_header if victim.endswith(".safetensors") else damage_json
        damaged = damage(files[victim], chance)
        (source / victim).write_bytes(damaged)
        try:
            with no_hang():
                crosshead.convert(source, out, chance.choice(MIXERS), verify=False)
        except ConversionError as error:
            refused += 1
            assert str(error) and "\n" not in str(error)
            assert file_names(tmp_path) == ["source"]
        else:
            assert file_names(tmp_path) == ["out", "source"]
            assert {"config.json", "conversion.json"} < set(file_names(out))
            shutil.rmtree(out)
        assert {file.name: file.read_bytes() for file in source.iterdir()} == files | {victim: damaged}
        shutil.rmtree(source)
    assert CHANGES / 2 < refused < CHANGES
