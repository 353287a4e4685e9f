from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.gguf.store import GgufStore

gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)

NOT_IN_GGUF = {"initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "architectures", "dtype"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_model(**changes: Any) -> Any:
    return gguf_toys.model("Llama", rope_parameters=LLAMA3 | changes, max_position_embeddings=131072)


def write_with_factors(path, model, **facts):
    """Write a GGUF file with `rope_freqs.weight` as llama.cpp does: the divisor of each RoPE frequency."""
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = model.config.rope_parameters["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
    tensors = gguf_toys.gguf_tensors(model, "llama")
    tensors["rope_freqs.weight"] = (plain / stretched.numpy()).astype(np.float32)
    return gguf_toys.write(path, tensors, gguf_toys.metadata(model, "llama") | facts, "llama")


@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_config_matches_model_config(tmp_path, backbone):
    changes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 70000.0}
    if backbone == "Qwen3Moe":
        changes |= {"norm_topk_prob": True, "num_experts": 5, "num_experts_per_tok": 3}
    model = gguf_toys.model(backbone, hidden_size=96, **changes)
    store = GgufStore(gguf_toys.write_model(tmp_path / "toy.gguf", model, backbone))
    result, expected = AutoConfig.for_model(**store.config).to_dict(), model.config.to_dict()
    assert {key: value for key, value in result.items() if key not in NOT_IN_GGUF} == {
        key: value for key, value in expected.items() if key not in NOT_IN_GGUF
    }
    assert store.config["architectures"] == [type(model).__name__]
    assert (store.config["bos_token_id"], store.config["eos_token_id"], store.config["pad_token_id"]) == (0, 0, None)


def test_biases_are_read_and_set_in_config(tmp_path):
    model = gguf_toys.model("Llama", attention_bias=True, mlp_bias=True)
    store = GgufStore(gguf_toys.write_model(tmp_path / "toy.gguf", model, "Llama"))
    assert store.config["attention_bias"] is store.config["mlp_bias"] is True
    assert store.entries.keys() == gguf_toys.stock_tensors(model).keys()
    for name, tensor in gguf_toys.stock_tensors(model).items():
        assert store.read(name).equal(tensor), name


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [
        ({}, "float32"),
        ({"": "F16"}, "float16"),
        ({"": "BF16"}, "bfloat16"),
        ({"": "Q8_0"}, "float32"),
        ({"": "F16", "ffn_up.weight": "Q8_0"}, "float32"),
    ],
)
def test_dtype_follows_matrix_formats(tmp_path, formats, dtype):
    model = gguf_toys.model("Llama")
    assert GgufStore(gguf_toys.write_model(tmp_path / "toy.gguf", model, "Llama", formats)).config["dtype"] == dtype


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_give_llama3_rope_parameters(tmp_path, factor):
    model = llama3_model(factor=factor)
    store = GgufStore(write_with_factors(tmp_path / "toy.gguf", model))
    assert store.config["rope_parameters"] == model.config.rope_parameters
    assert list(store.dropped) == ["rope_freqs.weight"]
    assert store.entries.keys() == gguf_toys.stock_tensors(model).keys()


def test_rope_factors_of_one_give_default_rope(tmp_path):
    model = gguf_toys.model("Llama")
    tensors = gguf_toys.gguf_tensors(model, "llama") | {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    path = gguf_toys.write(tmp_path / "toy.gguf", tensors, gguf_toys.metadata(model, "llama"), "llama")
    assert GgufStore(path).config["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize("changes", [{"low_freq_factor": 2.0}, {"original_max_position_embeddings": 4096}])
def test_other_rope_factors_give_longrope_with_same_frequencies(tmp_path, changes):
    model = llama3_model(**changes)
    store = GgufStore(write_with_factors(tmp_path / "toy.gguf", model))
    config = AutoConfig.for_model(**store.config)
    parameters = config.rope_parameters
    assert (parameters["rope_type"], parameters["attention_factor"]) == ("longrope", 1)
    for length in (None, 2 * config.max_position_embeddings):
        frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
        torch.testing.assert_close(frequencies, expected)
        assert scale == 1


@pytest.mark.parametrize("factors", [[1.0] * 7 + [2.0] * 2, [2.0] * 7 + [0.0], [2.0] * 7 + [-1.0], [float("nan")] * 8])
def test_invalid_rope_factors_are_refused(tmp_path, factors):
    model = gguf_toys.model("Llama")
    tensors = gguf_toys.gguf_tensors(model, "llama") | {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    path = gguf_toys.write(tmp_path / "toy.gguf", tensors, gguf_toys.metadata(model, "llama"), "llama")
    with pytest.raises(ConversionError, match="RoPE"):
        GgufStore(path)


def test_rope_factors_with_scaling_metadata_are_refused(tmp_path):
    facts = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(ConversionError, match="RoPE"):
        GgufStore(write_with_factors(tmp_path / "toy.gguf", llama3_model(), **facts))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": 1},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_metadata_sets_rope_parameters(tmp_path, facts, expected):
    model = gguf_toys.model("Qwen3")
    metadata = {f"qwen3.rope.scaling.{key}": value for key, value in facts.items()}
    store = GgufStore(gguf_toys.write_model(tmp_path / "toy.gguf", model, "Qwen3", **metadata))
    assert store.config["rope_parameters"] == expected | {"rope_theta": 10000.0}
    AutoConfig.for_model(**store.config)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"general.architecture": "gemma3"},
            "general.architecture='gemma3'",
        ),
        (
            {"llama.attention.sliding_window": 4},
            "llama.attention.sliding_window=4",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor=None"),
        ({"llama.attention.head_count": [2, 4]}, "llama.attention.head_count="),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count=0"),
        ({"llama.block_count": 2.0}, r"llama.block_count=2\.0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon=nan"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length=8"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"llama.attention.head_count_kv": 4}, "'blk.0.attn_k.weight'.* 4 heads of 16"),
        ({"general.alignment": 0}, "general.alignment=0"),
        ({"general.alignment": [32] * 1000}, r"general.alignment=\[32, .{10,60}\]: it must"),
        ({"llama.rope.scaling.factor": [2.0]}, r"llama.rope.scaling.factor=\[2\.0\]"),
        ({"tokenizer.ggml.eos_token_id": [0] * 1000}, r"tokenizer.ggml.eos_token_id=\[0, .{10,60}\], but"),
    ],
)
def test_unsupported_metadata_is_refused(tmp_path, facts, message):
    model = gguf_toys.model("Llama")
    metadata = gguf_toys.metadata(model, "llama") | facts
    architecture = metadata.pop("general.architecture", "llama")
    path = gguf_toys.write(tmp_path / "toy.gguf", gguf_toys.gguf_tensors(model, "llama"), metadata, architecture)
    with pytest.raises(ConversionError, match=message) as caught:
        GgufStore(path)
    assert "\n" not in str(caught.value)


def test_missing_expert_size_is_refused(tmp_path):
    model = gguf_toys.model("Qwen3Moe")
    metadata = gguf_toys.metadata(model, "qwen3moe")
    del metadata["qwen3moe.expert_feed_forward_length"]
    tensors = gguf_toys.gguf_tensors(model, "qwen3moe")
    path = gguf_toys.write(tmp_path / "toy.gguf", tensors, metadata, "qwen3moe")
    with pytest.raises(ConversionError, match="expert_feed_forward_length=None"):
        GgufStore(path)
