"""Experts selected with a bias: tensor counts, streaming and verification; a fold needs all biases to be zero."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.streamed_model import StreamedModel
from crosshead.conversion.sources.resolve import open_source
from crosshead.conversion.verification.verify import checked_model
from toy_checkpoints import MANY_SHARDS, write_model, write_stock

MIXERS = {"knocking": {"form": "linear"}}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
NAMES = {BIAS.replace(".1.", f".{layer}.") for layer in (0, 1)}


def write_biased_model(folder, bias=0.0, dtype=torch.float32):
    model = toys.mixed_model("Qwen3Moe", MIXERS, expert_bias=True)
    model.model.layers[1].mlp.gate.e_score_correction_bias[2] = bias
    return write_model(model, folder, MANY_SHARDS, dtype)


def logits(folder):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options)(toys.tokens()).logits


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.oldest), torch.bfloat16])
def test_fold_drops_zero_biases(dtype, tmp_path):
    model = write_biased_model(tmp_path / "model", dtype=dtype)
    report = crosshead.fold(model, tmp_path / "back")
    assert report["verification"]["tensors"]["unexpected"] == 0
    assert {name for name in report["dropped"] if "gate" in name} == NAMES
    assert "zero" in report["dropped"][BIAS]
    assert "expert_bias" not in json.loads((tmp_path / "back" / "config.json").read_text())
    shards = (load_file(file) for file in (tmp_path / "back").glob("*.safetensors"))
    assert not NAMES & {name for shard in shards for name in shard}
    difference = (logits(tmp_path / "back") - logits(model)).abs().max()
    assert difference <= (1e-5 if dtype == torch.float32 else 0.1) * logits(model).abs().max()


def test_fold_refuses_nonzero_biases_before_writing(tmp_path):
    model = write_biased_model(tmp_path / "model", 1e-3)
    with pytest.raises(ConversionError, match=BIAS):
        crosshead.fold(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_biases_are_counted_and_streamed_model_gives_same_logits(tmp_path):
    source = open_source(write_biased_model(tmp_path / "model", 0.4), scratch=tmp_path)
    config, tensors = checked_model(source)
    assert tensors == {"expected": len(source.store.entries), "missing": 0, "unexpected": 0}
    assert source.store.entries.keys() >= NAMES
    for dtype in (torch.float32, torch.bfloat16):
        streamed = StreamedModel(source.store, config, dtype, attn_implementation="eager")
        with torch.no_grad(), streamed.head() as head:
            streamed_logits = head(streamed.run(toys.tokens(1)))
            options = {"dtype": dtype, "attn_implementation": "eager"}
            whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
            assert torch.equal(streamed_logits, whole(toys.tokens(1)).logits)


def test_verify_accepts_model_with_trained_biases(tmp_path):
    source = write_stock(tmp_path / "source", "Qwen3Moe")
    crosshead.convert(source, tmp_path / "made", MIXERS)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", expert_bias=True)
    made.model.layers[1].mlp.gate.e_score_correction_bias[2] = 0.4
    write_model(made, tmp_path / "trained")
    report = crosshead.verify(source, tmp_path / "trained")["verification"]
    assert report["tensors"]["missing"] == report["tensors"]["unexpected"] == 0
    assert report["kl_divergence"] > 0 and report["reload"]["checked"] == "logits and text"


def test_stock_checkpoint_with_expert_bias_is_refused(tmp_path):
    source = write_stock(tmp_path / "source", "Qwen3Moe")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"expert_bias": True}))
    with pytest.raises(ConversionError, match="expert_bias=True"):
        crosshead.convert(source, tmp_path / "made", MIXERS)


def test_fold_refuses_checkpoint_with_missing_biases(tmp_path):
    model = write_biased_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    written_without = write_model(toys.mixed_model("Qwen3Moe", MIXERS), tmp_path / "without")
    (written_without / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="e_score_correction_bias"):
        crosshead.fold(written_without, tmp_path / "back")
