"""The joint fit lowers the divergence of predictions and changes component heads only; when it is left out."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosshead
from crosshead.conversion.calibration.text import default_text, windows
from crosshead.conversion.compress import joint_fit
from tiers import first
from toy_checkpoints import write_stock

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
FEWER = {"explicit": {"key_heads": 2, "value_heads": 2}}


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    monkeypatch.setattr(joint_fit, "STEPS", 16)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(default_text()[:6000], encoding="utf-8")
    return path


def divergence(source, model, text):
    """Mean KL divergence in nats per token on the windows that validate the fit."""
    tokens = windows(AutoTokenizer.from_pretrained(source), text.read_text(), 256, joint_fit.WINDOWS, 10**6)
    tokens = tokens[:: max(1, len(tokens) // joint_fit.VALIDATION_WINDOWS)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (source, model)]
    with torch.no_grad():
        wanted, predicted = (loaded(tokens).logits.double().log_softmax(-1) for loaded in models)
    return float((wanted.exp() * (wanted - predicted)).sum(-1).mean())


@pytest.mark.parametrize("case", first(["Qwen2-2", "Llama-1", "Llama-2", "Qwen3-1", "Qwen3Moe-1"]))
def test_joint_fit_lowers_divergence_and_records_it(case, text, tmp_path, monkeypatch):
    backbone, groups = case.split("-")
    source = write_stock(tmp_path / "source", backbone, **HEADS)
    mixers = {"explicit": FEWER["explicit"] | {"groups": int(groups)}}
    options = {"calibration": text, "verify": False}
    made = crosshead.convert(source, tmp_path / "made", mixers, **options)
    monkeypatch.setattr(joint_fit, "MIN_DIVERGENCE", 100.0)
    alone = crosshead.convert(source, tmp_path / "alone", mixers, **options)
    before, after = (divergence(source, tmp_path / name, text) for name in ("alone", "made"))
    assert after < before
    recorded = made["joint_fit"]
    assert recorded["divergence_before"] == alone["joint_fit"]["divergence_before"] == pytest.approx(before, rel=0.1)
    assert recorded["divergence_after"] == pytest.approx(after, rel=0.1)
    assert json.loads((tmp_path / "made/conversion.json").read_text())["joint_fit"] == recorded
    tensors, others = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "alone"))
    changed = {name.split(".", 3)[-1] for name, tensor in tensors.items() if not torch.equal(tensor, others[name])}
    fitted = {f"self_attn.{name}_proj.weight" for name in ("k", "v", "o")}
    fitted |= {f"self_attn.mixers.explicit.{side}.weight" for side in ("key", "value")}
    fitted |= set() if backbone.startswith("Qwen3") else {"self_attn.q_proj.weight"}
    fitted |= {f"self_attn.{name}_proj.bias" for name in "qkv"} if backbone == "Qwen2" else set()
    assert changed == fitted


@pytest.mark.slow
def test_divergence_of_chunks_is_that_of_whole_windows(text, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", **HEADS)
    for chunk in (7, 256):
        monkeypatch.setattr(joint_fit, "CHUNK", chunk)
        crosshead.convert(source, tmp_path / str(chunk), FEWER, calibration=text, verify=False)
    first_tensors, second = (load_file(tmp_path / str(chunk) / "model.safetensors") for chunk in (7, 256))
    for name, tensor in first_tensors.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-4)


def test_divergence_equals_its_definition():
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, expected = torch.randn(2, 6, 8)
    wanted, predicted = (functional.softmax(head(states).detach().double(), -1) for states in (expected, hidden))
    with torch.no_grad():
        value = joint_fit._divergence(head, hidden, expected)
    assert float(value) == pytest.approx(float((wanted * (wanted / predicted).log()).sum()), rel=1e-4)


@pytest.mark.parametrize("rate", first([100.0, float("nan")]))
def test_fit_that_raises_divergence_is_undone(rate, text, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", **HEADS)
    monkeypatch.setattr(joint_fit, "RATE", rate)
    made = crosshead.convert(source, tmp_path / "made", FEWER, calibration=text, verify=False)
    assert made["joint_fit"]["divergence_after"] == made["joint_fit"]["divergence_before"]
    monkeypatch.setattr(joint_fit, "MAX_SAMPLED_PARAMETERS", 0)
    alone = crosshead.convert(source, tmp_path / "alone", FEWER, calibration=text, verify=False)
    assert "joint_fit" not in alone
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("made", "alone")]
    assert weights[0] == weights[1]


def test_fit_is_left_out_without_memory_or_with_routed_heads(text, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", **HEADS)
    options = {"calibration": text, "verify": False, "overwrite": True}
    routed = FEWER | {"mixture": {"active_heads": 6}}
    assert "joint_fit" not in crosshead.convert(source, tmp_path / "made", routed, **options)
    saved = tmp_path / "saved.safetensors"
    assert "joint_fit" in crosshead.convert(source, tmp_path / "made", FEWER, save_calibration=saved, **options)
    again = crosshead.convert(source, tmp_path / "again", FEWER, **options | {"calibration": saved})
    assert "joint_fit" not in again
    assert again["tensors"] == json.loads((tmp_path / "made/conversion.json").read_text())["tensors"]
    monkeypatch.setattr(joint_fit, "fits_in_memory", lambda *_: False)
    assert "joint_fit" not in crosshead.convert(source, tmp_path / "made", FEWER, **options)
