"""Stock -> crosshead -> stock: every family, mechanism, head tie, sharding and dtype."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import crosshead
import toys
from crosshead.common.errors import ConversionError
from tiers import first, grid, oldest
from toy_checkpoints import MANY_SHARDS, write_model, write_stock

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NEUTRAL = {
    "knocking": {"knocking": {"on": ["query", "key", "value"]}},
    "linear": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},
    "explicit": {"explicit": {}},
    "talking": {"talking": {}},
    "mixture": {"mixture": {"active_heads": "100%", "shared_heads": 1}},
    "two_stage": {"mixture": {"active_heads": "100%", "router": "two_stage"}},
    "gating": {"gating": {}},
    "together": {
        "knocking": {"layers": [0]},
        "explicit": {},
        "talking": {"layers": [1]},
        "mixture": {"active_heads": 4},
    },
}
FOLDABLE = ("linear", "explicit", "mixture", "two_stage")


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def logits(folder):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options)(toys.tokens()).logits


@pytest.fixture(scope="module")
def stock_checkpoint(tmp_path_factory):
    """A cached function that writes a stock checkpoint and returns its folder, tensors and logits."""

    @cache
    def made(backbone, tied, shards, dtype):
        size = MANY_SHARDS if shards == "many files" else None
        folder = tmp_path_factory.mktemp("stock")
        write_stock(folder, backbone, size, DTYPES[dtype], tie_word_embeddings=tied == "tied")
        return folder, tensors(folder), logits(folder)

    return made


@pytest.mark.parametrize(
    ("backbone", "tied", "shards", "dtype", "name"),
    oldest(grid(toys.BACKBONES, ("tied", "untied"), ("one file", "many files"), DTYPES, NEUTRAL)),
)
def test_neutral_conversion_and_fold_round_trip(backbone, tied, shards, dtype, name, stock_checkpoint, tmp_path):
    source, before, expected = stock_checkpoint(backbone, tied, shards, dtype)
    out, back = tmp_path / "out", tmp_path / "back"
    report = crosshead.convert(source, out, NEUTRAL[name], verify=False)
    assert report["counts"]["rewritten"] == 0
    assert report["tolerance"]["divergence"] == 1e-5
    made = tensors(out)
    assert same_bits(before, {key: made[key] for key in before})
    difference = (logits(out) - expected).abs().max()
    divides = backbone.startswith("Qwen3") and "explicit" in NEUTRAL[name]
    assert difference <= (1e-5 * expected.abs().max() if divides else 0)
    crosshead.fold(out, back, verify=False)
    assert same_bits(before, tensors(back))
    assert torch.equal(logits(back), expected)
    assert len(list(back.glob("*.safetensors"))) == len(list(source.glob("*.safetensors")))
    assert same_bits(before, tensors(source))


LAID_OUT = {"fp32": (False, MANY_SHARDS), "fp16": (True, MANY_SHARDS), "bf16": (True, None)}
"""Dtype -> whether the head is tied to the embedding, and the maximum shard size."""


@pytest.mark.parametrize(("backbone", "name", "dtype"), oldest(grid(toys.BACKBONES, FOLDABLE, DTYPES)))
def test_trained_mixers_fold_to_stock_model_with_same_logits(backbone, name, dtype, tmp_path):
    tied, size = LAID_OUT[dtype]
    source = write_stock(tmp_path / "source", backbone, size, tie_word_embeddings=tied)
    crosshead.convert(source, tmp_path / "made", NEUTRAL[name], verify=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if ".mixers." in key:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    write_model(model, tmp_path / "trained", size, DTYPES[dtype])
    crosshead.fold(tmp_path / "trained", tmp_path / "back", verify=False)
    expected, result = logits(tmp_path / "trained"), logits(tmp_path / "back")
    rounding = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1e-1}[dtype]
    assert (result - expected).norm() <= rounding * expected.norm()
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert content["model_type"] == toys.STOCK[backbone][0].model_type
    assert not {"mixers", "auto_map"} & content.keys()
    assert content["architectures"] == [toys.STOCK[backbone][1].__name__]
    assert not list((tmp_path / "back").glob("*.py"))
    assert not any(b"crosshead" in file.read_bytes() for file in (tmp_path / "back").iterdir())
    record = json.loads((tmp_path / "back.conversion.json").read_text())
    assert record["command"] == "fold" and record["tensors"].keys() == tensors(tmp_path / "back").keys()


@pytest.mark.parametrize("router", first(["two_stage", "query_norm"]))
def test_mixture_with_inactive_heads_is_inexact_and_not_foldable(router, tmp_path):
    source = write_stock(tmp_path / "source")
    mixers = {"mixture": {"active_heads": 3, "shared_heads": 1, "router": router}}
    report = crosshead.convert(source, tmp_path / "made", mixers)
    assert report["tolerance"] is None and report["verification"]["kl_divergence"] > 1e-4
    assert report["verification"]["reload"]["greatest_logit_difference"] < 1e-5
    created = {name.rpartition("mixture.")[2] for name in tensors(tmp_path / "made") if ".mixers." in name}
    assert created == ({"shared.weight", "routed.weight", "balance.weight"} if router == "two_stage" else set())
    with pytest.raises(ConversionError, match="active_heads"):
        crosshead.fold(tmp_path / "made", tmp_path / "back")


@pytest.mark.parametrize("dtype", first(["float16", "bfloat16"]))
def test_dtype_option_converts_all_tensors(dtype, tmp_path):
    source = write_stock(tmp_path / "source", shard_size=MANY_SHARDS)
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {}}, dtype=dtype, verify=False)
    expected = getattr(torch, dtype)
    before, made = tensors(source), tensors(tmp_path / "made")
    assert all(torch.equal(made[name], before[name].to(expected)) for name in before)
    assert {tensor.dtype for tensor in made.values()} == {expected}
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == dtype
    assert report["tolerance"]["divergence"] > 1e-5


STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {"plain": None, "stretched": STRETCHED | {"rope_type": "llama3"}}


@pytest.mark.parametrize(("backbone", "scaling"), grid(toys.BACKBONES, SCALINGS, strength=1))
def test_folded_config_keeps_field_names_of_transformers_4(backbone, scaling, tmp_path):
    """Otherwise transformers 4 (tested: 4.57) would use default RoPE settings, and the model would fail."""
    source = write_stock(tmp_path / "source", backbone)
    content = json.loads((source / "config.json").read_text())
    older = {"rope_theta": 500000.0} | ({"rope_scaling": SCALINGS[scaling]} if SCALINGS[scaling] else {})
    if "num_local_experts" in content:
        older["num_experts"] = content.pop("num_local_experts")
    del content["rope_parameters"]
    (source / "config.json").write_text(json.dumps(content | older))
    folder = source
    for name in ("once", "twice"):
        crosshead.convert(folder, tmp_path / name, {"explicit": {}}, verify=False)
        folder = tmp_path / f"{name}-back"
        crosshead.fold(tmp_path / name, folder, verify=False)
        folded = json.loads((folder / "config.json").read_text())
        assert {key: folded.get(key) for key in (*older, "rope_scaling")} == {"rope_scaling": None} | older
        assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("tied", first([True, False]))
def test_larger_vocabulary_keeps_old_logits(tied, tmp_path):
    source = write_stock(tmp_path / "source", tie_word_embeddings=tied)
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {}}, vocab_size=80)
    assert report["verification"]["greatest_logit_difference"] == 0
    assert report["counts"]["rewritten"] == (1 if tied else 2)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made").config.vocab_size == 80
    assert logits(tmp_path / "made").shape[-1] == 80


def test_stored_tied_head_is_dropped_and_reported(tmp_path):
    source = write_stock(tmp_path / "source", tie_word_embeddings=True)
    from safetensors.torch import save_file

    state = tensors(source)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {}}, verify=False)
    assert report["dropped"] == {"lm_head.weight": "tied to model.embed_tokens.weight"}
    assert "lm_head.weight" not in tensors(tmp_path / "made")
