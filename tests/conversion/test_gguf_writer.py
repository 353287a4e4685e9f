"""Models folded to GGUF files: the same content that llama.cpp's converter writes for the folded folder."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import crosshead
import toys
from broken import state, value
from crosshead.common.errors import ConversionError
from crosshead.conversion.gguf.store import GgufStore
from crosshead.conversion.gguf.writer import FILE_TYPES
from tiers import grid, oldest

gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("gguf_tokenizers")

NOT_IN_GGUF = {"initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "dtype", "_name_or_path"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = [1.0, 2.5, 0.5, 4.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "attention_factor": 1.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def quantisable_sizes(backbone):
    """Return toy sizes whose matrices can be quantised."""
    all_sizes = gguf_toys.SIZES | ({"head_dim": 32} if backbone.startswith("Qwen3") else {})
    return (
        all_sizes if backbone == "Qwen3Moe" else {k: v for k, v in all_sizes.items() if k != "moe_intermediate_size"}
    )


def fold_model(folder, backbone="Llama", type=None, **changes):
    """Fold a model to a GGUF file and to a folder; return the record, the file and the folder."""
    made = tokenizers.write_mixed(folder / "made", backbone, **changes)
    report = crosshead.fold(made, folder / "x.gguf", type=type)
    crosshead.fold(made, folder / "stock", verify=False)
    return report, folder / "x.gguf", folder / "stock"


def load_stock(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def read_gguf(path):
    """Return the metadata fields and the tensors of a file, as the gguf package reads them."""
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}, {
        each.name: each for each in reader.tensors
    }


@pytest.mark.parametrize(("backbone", "tied"), oldest(grid(toys.BACKBONES, (True, False))))
def test_written_file_reads_back_as_folded_model(backbone, tied, tmp_path):
    report, path, folder = fold_model(tmp_path, backbone, tie_word_embeddings=tied, rms_norm_eps=1e-5)
    verification = report["verification"]
    assert verification["must_equal"] and verification["kl_divergence"] < 1e-6
    store, expected = GgufStore(path), load_file(folder / "model.safetensors")
    assert store.entries.keys() == expected.keys() == report["tensors"].keys()
    assert all(torch.equal(store.read(name), tensor) for name, tensor in expected.items())
    result, expected_config = (
        AutoConfig.for_model(**store.config).to_dict(),
        AutoConfig.from_pretrained(folder).to_dict(),
    )
    result["head_dim"] = expected_config.setdefault("head_dim", result["head_dim"])  # Qwen2 has no such field
    assert {key: value for key, value in result.items() if key not in NOT_IN_GGUF} == {
        key: value for key, value in expected_config.items() if key not in NOT_IN_GGUF
    }
    assert json.loads((tmp_path / "x.gguf.conversion.json").read_text()) == {
        key: value for key, value in report.items() if key != "folder"
    }


def test_stock_model_gives_same_file_as_folded_model(tmp_path):
    _, path, folder = fold_model(tmp_path, "Llama")
    report = crosshead.fold(folder, tmp_path / "again.gguf")
    assert report["verification"]["must_equal"] and report["counts"]["rewritten"] == 0
    names = {**read_gguf(path)[0], "general.name": folder.name}
    assert read_gguf(tmp_path / "again.gguf")[0] == names
    (_, one), (_, other) = read_gguf(path), read_gguf(tmp_path / "again.gguf")
    assert all((one[name].data == other[name].data).all() for name in one | other)


@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_tensors_and_metadata_match_reference_writer(backbone, tmp_path):
    """Names from gguf's own table, interleaved rows of queries and keys, stacked experts, the same metadata."""
    _, path, folder = fold_model(tmp_path, backbone, **quantisable_sizes(backbone))
    model, architecture = load_stock(folder), gguf_toys.ARCHITECTURES[backbone]
    fields, tensors = read_gguf(path)
    expected = gguf_toys.gguf_tensors(model, architecture)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert tensors[name].data.shape == values.shape and (tensors[name].data == values).all(), name
    expected_fields = gguf_toys.metadata(model, architecture)
    expected_fields = {key: value for key, value in expected_fields.items() if key.startswith(architecture)}
    assert {key: fields[key] for key in expected_fields} == pytest.approx(expected_fields, rel=1e-6)
    assert fields["general.architecture"] == architecture and fields["general.file_type"] == 0
    assert fields["general.name"] == "made" and fields[f"{architecture}.rope.dimension_count"] == model.config.head_dim


@pytest.mark.parametrize(("backbone", "type"), grid(toys.BACKBONES, FILE_TYPES, strength=1))
def test_file_types_quantise_matrices_only(backbone, type, tmp_path):
    report, path, folder = fold_model(tmp_path, backbone, type, **quantisable_sizes(backbone))
    fields, tensors = read_gguf(path)
    assert gguf.LlamaFileType(fields["general.file_type"]).name.endswith(type.upper())
    assert (fields.get("general.quantization_version") == 2) is (type not in ("f32", "f16", "bf16"))
    form = gguf.GGMLQuantizationType[type.upper()]
    for name, values in gguf_toys.gguf_tensors(load_stock(folder), gguf_toys.ARCHITECTURES[backbone]).items():
        is_single = values.ndim == 1 or "ffn_gate_inp" in name
        expected = values if is_single else gguf.quantize(values, form)
        assert (
            tensors[name].tensor_type.name == ("F32" if is_single else type.upper()) == report["gguf"]["tensors"][name]
        )
        assert (tensors[name].data == expected).all(), name
    assert report["options"] == {"type": type} and report["gguf"]["type"] == type
    quantised = type not in ("f32", "f16", "bf16")
    assert (report["tolerance"] is None) is quantised is not report["verification"]["must_equal"]
    assert report["verification"]["kl_divergence"] < (0.02 if type in ("q8_0", "bf16", "f16") else 1)


@pytest.mark.parametrize(("dtype", "form"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_default_type_follows_model_dtype(dtype, form, tmp_path):
    report, path, folder = fold_model(tmp_path, dtype=getattr(torch, dtype))
    _, tensors = read_gguf(path)
    assert {each.tensor_type.name for each in tensors.values()} == {form, "F32"}
    store = GgufStore(path)
    assert store.config["dtype"] == dtype
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(store.read(name), tensor.to(store.read(name).dtype))
    assert report["gguf"]["type"] == form.lower()


def test_rows_not_divisible_by_block_are_written_as_f16(tmp_path):
    report, path, _ = fold_model(tmp_path, type="q4_0", **quantisable_sizes("Llama") | {"intermediate_size": 40})
    _, tensors = read_gguf(path)
    assert {name for name, each in tensors.items() if each.tensor_type.name == "F16"} == {
        f"blk.{layer}.ffn_down.weight" for layer in (0, 1)
    }
    assert report["gguf"]["not_quantised"] == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]


def test_biases_are_written(tmp_path):
    made = tokenizers.write_mixed(tmp_path / "made", attention_bias=True, mlp_bias=True)
    state(lambda tensors: [tensors[name].zero_() for name in tensors if name.endswith("o_proj.bias")])(made)
    report = crosshead.fold(made, tmp_path / "x.gguf")
    assert report["verification"]["kl_divergence"] < 1e-6
    crosshead.fold(made, tmp_path / "stock", verify=False)
    _, tensors = read_gguf(tmp_path / "x.gguf")
    expected = gguf_toys.gguf_tensors(load_stock(tmp_path / "stock"), "llama")
    biases = {name for name in expected if name.endswith(".bias")}
    assert len(biases) == 2 * 7 and biases < tensors.keys()
    assert all((tensors[name].data == expected[name]).all() for name in biases)
    assert tensors["blk.0.attn_q.bias"].data.any() and not tensors["blk.0.attn_output.bias"].data.any()


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        (LLAMA3, "llama3"),
        (LLAMA3 | {"low_freq_factor": 2.0, "original_max_position_embeddings": 64}, "longrope"),
        (LONGROPE, "longrope"),
        (YARN, "yarn"),
        (LINEAR, "linear"),
    ],
)
def test_rope_parameters_are_written(rope, kind, tmp_path):
    _, path, folder = fold_model(tmp_path, rope_parameters=rope)
    parameters = GgufStore(path).config["rope_parameters"]
    assert parameters["rope_type"] == kind
    if kind == rope["rope_type"] != "longrope":
        assert parameters == rope
    _, tensors = read_gguf(path)
    inverse = load_stock(folder).model.rotary_emb.inv_freq
    if "rope_freqs.weight" in tensors:
        plain = rope["rope_theta"] ** -(torch.arange(0, 8, 2) / 8)
        torch.testing.assert_close(torch.tensor(tensors["rope_freqs.weight"].data), plain / inverse, rtol=1e-5, atol=0)
    assert ("rope_freqs.weight" in tensors) is (rope["rope_type"] in ("llama3", "longrope"))


def test_yarn_rope_round_trips_for_qwen2(tmp_path):
    _, path, _ = fold_model(tmp_path, "Qwen2", rope_parameters=YARN)
    assert GgufStore(path).config["rope_parameters"] == YARN


REFUSED = {
    "dynamic": ("Llama", {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}, "'dynamic'"),
    "two lists": ("Llama", {"rope_parameters": LONGROPE | {"long_factor": FACTORS[::-1]}}, "short_factor"),
    "scaled": ("Llama", {"rope_parameters": LONGROPE | {"attention_factor": 1.5}}, "attention_factor=1.5"),
    "beta": ("Llama", {"rope_parameters": YARN | {"beta_fast": 16}}, "beta_fast=16"),
    "scaled yarn": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor=1.0"),
    "equal frequency factors": (
        "Llama",
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}},
        "high_freq_factor=4.0",
    ),
    "llama3 elsewhere": ("Qwen3", {"rope_parameters": LLAMA3}, "rope_type='llama3'"),
    "activation": ("Llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window=True"),
    "biases": ("Qwen3", {"attention_bias": True}, "attention_bias=True"),
    "routing": ("Qwen3Moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    "dense layers": ("Qwen3Moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_unsupported_by_llama_cpp_are_refused(name, tmp_path):
    backbone, changes, words = REFUSED[name]
    made = tokenizers.write_mixed(tmp_path / "made", backbone, **changes)
    with pytest.raises(ConversionError) as caught:
        crosshead.fold(made, tmp_path / "x.gguf", verify=False)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_file_does_not_depend_on_chunk_size(tmp_path, monkeypatch):
    made = tokenizers.write_mixed(tmp_path / "made", **quantisable_sizes("Llama"))
    crosshead.fold(made, tmp_path / "one.gguf", type="q8_0", verify=False)
    monkeypatch.setattr("crosshead.conversion.writing.shard_writer.CHUNK", 1)
    crosshead.fold(made, tmp_path / "many.gguf", type="q8_0", verify=False)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()


def test_values_that_overflow_float16_are_refused(tmp_path):
    made = tokenizers.write_mixed(tmp_path / "made", **quantisable_sizes("Llama"))
    value("model.layers.0.mlp.up_proj.weight", 1e6)(made)
    for type in ("f16", "q8_0"):
        with pytest.raises(ConversionError, match=r"up_proj.* --type bf16"):
            crosshead.fold(made, tmp_path / "x.gguf", type=type, verify=False)
    crosshead.fold(made, tmp_path / "x.gguf", type="bf16", verify=False)


def test_verification_detects_wrong_file(tmp_path, monkeypatch):
    from crosshead.conversion.gguf import writer

    made = tokenizers.write_mixed(tmp_path / "made")
    monkeypatch.setattr(writer, "interleaved", lambda rows, head_rows: rows)
    with pytest.raises(ConversionError, match=r"[qk]_proj"):
        crosshead.fold(made, tmp_path / "x.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_dry_run_reports_tensors_and_size(tmp_path):
    made = tokenizers.write_mixed(tmp_path / "made", **quantisable_sizes("Llama"))
    report = crosshead.fold(made, tmp_path / "x.gguf", type="q8_0", plan_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert report["tensors"]["token_embd.weight"] == {"fate": "rewritten", "dtype": "Q8_0", "shape": [320, 64]}
    assert report["tensors"]["output_norm.weight"] == {"fate": "copied", "dtype": "F32", "shape": [64]}
    crosshead.fold(made, tmp_path / "x.gguf", type="q8_0", verify=False)
    assert report["bytes"] <= (tmp_path / "x.gguf").stat().st_size < report["bytes"] + 20_000
