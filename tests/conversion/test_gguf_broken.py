import random
import struct
import sys

import pytest

from crosshead.common.errors import ConversionError
from crosshead.conversion.gguf.store import GgufStore

gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    model = gguf_toys.model("Llama", num_hidden_layers=1)
    return gguf_toys.write_model(tmp_path_factory.mktemp("whole") / "toy.gguf", model, "Llama").read_bytes()


def replace_bytes(old: bytes, new: bytes):
    def change(raw: bytes) -> bytes:
        assert old in raw
        return raw.replace(old, new, 1)

    return change


def length_prefixed(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


Q_SHAPE = length_prefixed("blk.0.attn_q.weight") + struct.pack("<I2Q", 2, 64, 64)
NORM_SHAPE = length_prefixed("output_norm.weight") + struct.pack("<IQ", 1, 64)

DAMAGES = {
    "empty": (lambda raw: b"", "0 bytes"),
    "wrong magic": (lambda raw: b"GGML" + raw[4:], "GGUF"),
    "version 1": (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1"),
    "big-endian": (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "50331648"),
    "cut in the header": (lambda raw: raw[:500], "500 bytes"),
    "cut in the data": (lambda raw: raw[:-100], "tensor '.*' .*byte"),
    "many tensors": (lambda raw: raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "tensor '' has 0 dim"),
    "much metadata": (lambda raw: raw[:16] + struct.pack("<Q", 2**60) + raw[24:], r"string of \d+ bytes"),
    "long string": (replace_bytes(length_prefixed("tokenizer.ggml.pre")[:8], struct.pack("<Q", 2**62)), str(2**62)),
    "not UTF-8": (replace_bytes(b"tokenizer.ggml.pre", b"tokenizer.ggml.pr\xff"), "UTF-8"),
    "unknown kind": (
        replace_bytes(
            length_prefixed("tokenizer.ggml.pre") + b"\x08", length_prefixed("tokenizer.ggml.pre") + b"\x0d"
        ),
        "type 13",
    ),
    "list of lists": (
        replace_bytes(
            length_prefixed("tokenizer.ggml.tokens") + struct.pack("<II", 9, 8),
            length_prefixed("tokenizer.ggml.tokens") + struct.pack("<II", 9, 9),
        ),
        "type 9",
    ),
    "list for a string": (
        replace_bytes(
            length_prefixed("general.architecture") + struct.pack("<I", 8) + length_prefixed("llama"),
            length_prefixed("general.architecture") + struct.pack("<IIQB", 9, 0, 1, 7),
        ),
        r"general\.architecture=\[7\]",
    ),
    "long list": (
        replace_bytes(
            length_prefixed("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, 61),
            length_prefixed("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, 2**61),
        ),
        r"toy\.gguf",
    ),
    "unknown tensor": (replace_bytes(b"blk.0.attn_q.weight", b"blk.0.attn_s.weight"), "'blk.0.attn_s.weight'"),
    "two of a name": (replace_bytes(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), r"toy\.gguf"),
    "unknown format": (replace_bytes(Q_SHAPE + b"\x00", Q_SHAPE + b"\xc8"), "200"),
    "integers": (
        replace_bytes(Q_SHAPE + b"\x00", Q_SHAPE + b"\x1a"),
        "I32",
    ),
    "Q8_1": (replace_bytes(Q_SHAPE + b"\x00", Q_SHAPE + b"\x09"), "Q8_1"),
    "quantised vector": (replace_bytes(NORM_SHAPE + b"\x00", NORM_SHAPE + b"\x08"), "Q8_0"),
    "part of a block": (replace_bytes(Q_SHAPE + b"\x00", Q_SHAPE + b"\x0e"), r"\[64, 64\].*Q6_K"),
    "no dimensions": (replace_bytes(Q_SHAPE, Q_SHAPE.replace(b"\x02\0\0\0", b"\0\0\0\0")), "0 dimensions"),
    "size of zero": (replace_bytes(Q_SHAPE, Q_SHAPE[:-8] + bytes(8)), r"\[0, 64\]"),
    "absurd size": (replace_bytes(Q_SHAPE, Q_SHAPE[:-8] + struct.pack("<Q", 2**60)), str(2**60)),
    "no embedding": (replace_bytes(b"token_embd.weight", b"token_embE.weight"), "'token_embd.weight'"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_gguf_gives_one_line_error(tmp_path, gguf_bytes, damage, message):
    path = tmp_path / "toy.gguf"
    path.write_bytes(damage(gguf_bytes))
    with pytest.raises(ConversionError, match=message) as caught:
        GgufStore(path)
    assert "\n" not in str(caught.value)


def test_vocabulary_only_gguf_is_refused(tmp_path):
    path = gguf_toys.write(tmp_path / "toy.gguf", {}, gguf_toys.TOKENIZER, "llama")
    with pytest.raises(ConversionError, match="vocabulary"):
        GgufStore(path)


@pytest.mark.parametrize("count", [3, 2**32 - 1])
def test_wrong_expert_count_is_refused(tmp_path, count):
    model = gguf_toys.model("Qwen3Moe")
    path = gguf_toys.write_model(tmp_path / "toy.gguf", model, "Qwen3Moe", **{"qwen3moe.expert_count": count})
    with pytest.raises(ConversionError, match=rf"\[4, 64, 64\].*{count}"):
        GgufStore(path)


def test_missing_gguf_package_names_pip_install(tmp_path, gguf_bytes, monkeypatch):
    (tmp_path / "toy.gguf").write_bytes(gguf_bytes)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConversionError, match=r'pip install "crosshead\[gguf\]"'):
        GgufStore(tmp_path / "toy.gguf")


def test_random_header_damage_loads_or_gives_one_line_error(tmp_path, gguf_bytes):
    generator = random.Random(0)
    header = gguf_bytes.index(b"blk.0.ffn_norm.weight") + 60
    path, refused = tmp_path / "toy.gguf", 0
    for _ in range(400):
        raw = bytearray(gguf_bytes)
        for _ in range(generator.randint(1, 4)):
            raw[generator.randrange(header)] = generator.choice((0, 1, 255, generator.randrange(256)))
        path.write_bytes(bytes(raw))
        try:
            store = GgufStore(path)
            for name in store.entries:
                store.read(name)
        except ConversionError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 100 < refused < 400
