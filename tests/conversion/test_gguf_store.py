from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.gguf import store as gguf_store
from crosshead.conversion.sources.tensor_store import DTYPES, TensorStore
from tiers import grid, oldest

gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)
GgufStore = gguf_store.GgufStore

FORMATS: dict[str, dict[str, str]] = {
    "F32": {},
    "F16": {"": "F16"},
    "BF16": {"": "BF16"},
    "Q8_0": {"": "Q8_0"},
    "Q4_0": {"": "Q4_0"},
    "Q4_1 and Q8_0": {"": "Q4_1", "token_embd.weight": "Q8_0"},
    "Q6_K": {"": "F16", "ffn_down.weight": "Q6_K"},
}


def joined_chunks(store: TensorStore, name: str) -> bytes:
    return b"".join(bytes(chunk) for chunk in store.chunks(name))


def write_and_open(
    path: Path, backbone: str, formats: dict[str, str] | None = None, **changes: Any
) -> tuple[Any, Any]:
    model = gguf_toys.model(backbone, **changes)
    return model, GgufStore(gguf_toys.write_model(path / "toy.gguf", model, backbone, formats))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_store_reads_written_tensors(tmp_path, backbone, tied):
    model, store = write_and_open(tmp_path, backbone, tie_word_embeddings=tied)
    expected = gguf_toys.stock_tensors(model)
    assert store.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(store.read(name), tensor), name
        assert joined_chunks(store, name) == tensor.numpy().tobytes(), name
        assert store.entries[name].shape == tensor.shape
    assert store.config["tie_word_embeddings"] is tied


@pytest.mark.parametrize(("backbone", "form"), oldest(grid(toys.BACKBONES, FORMATS, strength=1)))
def test_dequantised_tensors_match_transformers(tmp_path, backbone, form):
    _, store = write_and_open(tmp_path, backbone, FORMATS[form])
    config = AutoConfig.for_model(**store.config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="toy.gguf", config=config, dtype=torch.float32)
    expected = gguf_toys.stock_tensors(model)
    assert store.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(store.read(name).float(), tensor), name


def test_unquantised_tensors_keep_dtype(tmp_path):
    _, store = write_and_open(tmp_path, "Llama", {"": "Q8_0", "token_embd.weight": "BF16", "attn_q.weight": "F16"})
    dtypes = {name.removeprefix("model.layers.0."): entry.dtype for name, entry in store.entries.items()}
    assert dtypes["model.embed_tokens.weight"] == "BF16"
    assert dtypes["self_attn.q_proj.weight"] == "F16"
    assert dtypes["self_attn.k_proj.weight"] == dtypes["input_layernorm.weight"] == "F32"
    for name, entry in store.entries.items():
        tensor = store.read(name)
        assert tensor.dtype == DTYPES[entry.dtype]
        assert joined_chunks(store, name) == tensor.view(torch.uint8).numpy().tobytes()


def test_chunks_contain_whole_heads(tmp_path, monkeypatch):
    model, store = write_and_open(tmp_path, "Llama")
    monkeypatch.setattr("crosshead.conversion.gguf.tensors.CHUNK", 1)
    for name, tensor in gguf_toys.stock_tensors(model).items():
        assert torch.equal(store.read(name), tensor)
    assert len(list(store.chunks("model.layers.0.self_attn.q_proj.weight"))) == model.config.num_attention_heads
    assert len(list(store.chunks("model.layers.0.self_attn.v_proj.weight"))) == 32


def test_shards_follow_layer_order_and_size_limit(tmp_path, monkeypatch):
    _, store = write_and_open(tmp_path, "Qwen3Moe", tie_word_embeddings=False)
    assert list(store.shards) == ["model.safetensors"]
    monkeypatch.setattr(gguf_store, "MAX_SHARD", 60_000)
    sharded = GgufStore(tmp_path / "toy.gguf")
    count = len(sharded.shards)
    assert list(sharded.shards) == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = [name for names in sharded.shards.values() for name in names]
    assert names == store.shards["model.safetensors"] == list(store.entries)
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert names[0] == "model.embed_tokens.weight"
    assert layers == sorted(layers)
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"] or names[-2:] == [
        "lm_head.weight",
        "model.norm.weight",
    ]
    for group in sharded.shards.values():
        assert len(group) == 1 or sum(sharded.entries[name].size for name in group) <= 60_000


def test_split_file_is_read_and_missing_part_is_refused(tmp_path):
    model = gguf_toys.model("Llama")
    tensors = list(gguf_toys.gguf_tensors(model, "llama").items())
    facts = gguf_toys.metadata(model, "llama")
    for index, (part, fields) in enumerate(((tensors[:4], facts), (tensors[4:], {}))):
        path = tmp_path / f"toy-0000{index + 1}-of-00002.gguf"
        gguf_toys.write(path, dict(part), fields | {"split.count": 2}, "llama")
    for path in sorted(tmp_path.iterdir()):
        store = GgufStore(path)
        for name, tensor in gguf_toys.stock_tensors(model).items():
            assert torch.equal(store.read(name), tensor)
    path.unlink()
    with pytest.raises(ConversionError, match=r"toy-00002-of-00002\.gguf"):
        GgufStore(tmp_path / "toy-00001-of-00002.gguf")
    (tmp_path / "toy-00001-of-00002.gguf").rename(tmp_path / "alone.gguf")
    with pytest.raises(ConversionError, match=r"alone\.gguf.* 2 parts"):
        GgufStore(tmp_path / "alone.gguf")


def test_fingerprint_changes_with_file_content(tmp_path):
    model, store = write_and_open(tmp_path, "Llama")
    assert GgufStore(tmp_path / "toy.gguf").fingerprint() == store.fingerprint()
    (tmp_path / "toy.gguf").unlink()
    gguf_toys.write_model(tmp_path / "toy.gguf", model, "Llama", {"": "F16"})
    assert GgufStore(tmp_path / "toy.gguf").fingerprint() != store.fingerprint()
