"""The joint fit lowers the divergence of predictions and changes compressed attention only; when it is left out."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosshead
from crosshead.common.errors import ConversionError
from crosshead.conversion import convert
from crosshead.conversion.calibration.text import default_text, windows
from crosshead.conversion.compress import joint_fit
from crosshead.conversion.writing.atomic_output import AtomicOutput
from tiers import first
from toy_checkpoints import write_stock

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
FEWER = {"explicit": {"key_heads": 2, "value_heads": 2}}


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    for name in ("STEPS", "ROUTED_STEPS"):
        monkeypatch.setattr(joint_fit, name, 16)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(default_text()[:6000], encoding="utf-8")
    return path


def divergence(source, model, text):
    """Mean KL divergence in nats per token on the windows that validate the fit."""
    tokens = windows(AutoTokenizer.from_pretrained(source), text.read_text(), 256, 2 * joint_fit.STEPS, 10**6)
    tokens = tokens[:: max(1, len(tokens) // joint_fit.VALIDATION_WINDOWS)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (source, model)]
    with torch.no_grad():
        wanted, predicted = (loaded(tokens).logits.double().log_softmax(-1) for loaded in models)
    return float((wanted.exp() * (wanted - predicted)).sum(-1).mean())


CASES = ["Qwen2-2", "Qwen2-routed", "Llama-both", "Llama-1", "Llama-2", "Llama-routed", "Qwen3-1", "Qwen3Moe-1"]
CASES += ["Qwen3Moe-routed", "Qwen2-both"]
ROUTED = {"mixture": {"active_heads": 5}}


@pytest.mark.parametrize("case", first(CASES, 3))
def test_joint_fit_lowers_divergence_and_records_it(case, text, tmp_path, monkeypatch):
    backbone, kind = case.split("-")
    source = write_stock(tmp_path / "source", backbone, **HEADS)
    is_routed, has_components = kind in ("routed", "both"), kind != "routed"
    mixers = (ROUTED if is_routed else {}) | (FEWER if has_components else {})
    if kind.isdigit():
        mixers = {"explicit": FEWER["explicit"] | {"groups": int(kind)}}
    options = {"calibration": text, "verify": False}
    made = crosshead.convert(source, tmp_path / "made", mixers, **options)
    monkeypatch.setattr(joint_fit, "MIN_DIVERGENCE", 100.0)
    alone = crosshead.convert(source, tmp_path / "alone", mixers, **options)
    assert "joint_fit" not in alone
    before, after = (divergence(source, tmp_path / name, text) for name in ("alone", "made"))
    assert after < before
    recorded = made["joint_fit"]
    assert recorded["divergence_before"] == pytest.approx(before, rel=0.1)
    assert recorded["divergence_after"] == pytest.approx(after, rel=0.1)
    assert json.loads((tmp_path / "made/conversion.json").read_text())["joint_fit"] == recorded
    tensors, others = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "alone"))
    changed = {name.split(".", 3)[-1] for name, tensor in tensors.items() if not torch.equal(tensor, others[name])}
    fitted = {f"self_attn.{name}_proj.weight" for name in ("k", "v", "o")}
    fitted |= {f"self_attn.mixers.explicit.{side}.weight" for side in ("key", "value") if has_components}
    fitted |= {"self_attn.q_proj.weight"} if is_routed or not backbone.startswith("Qwen3") else set()
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


def test_divergence_and_gradient_equal_their_definition(monkeypatch):
    monkeypatch.setattr(joint_fit, "CHUNK", 4)
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, expected = torch.randn(2, 6, 8)
    hidden.requires_grad_()
    wanted, predicted = (functional.softmax(head(states).double(), -1) for states in (expected, hidden))
    defined = (wanted.detach() * (wanted.detach() / predicted).log()).sum(-1).mean()
    defined.backward()
    value, gradient = joint_fit.divergence(head, hidden, expected)
    assert value == pytest.approx(float(defined.detach()), rel=1e-4)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rate", first([100.0, float("nan")]))
def test_fit_that_raises_divergence_is_undone(rate, text, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", **HEADS)
    monkeypatch.setattr(joint_fit, "RATE", rate)
    made = crosshead.convert(source, tmp_path / "made", FEWER, calibration=text, verify=False)
    assert "joint_fit" not in made
    monkeypatch.setattr(joint_fit, "MAX_SAMPLED_PARAMETERS", 0)
    alone = crosshead.convert(source, tmp_path / "alone", FEWER, calibration=text, verify=False)
    assert "joint_fit" not in alone
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("made", "alone")]
    assert weights[0] == weights[1]


def test_saved_calibration_has_jointly_fitted_tensors(text, tmp_path):
    source = write_stock(tmp_path / "source", **HEADS)
    saved = tmp_path / "saved.safetensors"
    for name, mixers in (("components", FEWER), ("routed", ROUTED)):
        options = {"calibration": text, "verify": False, "save_calibration": saved}
        made = crosshead.convert(source, tmp_path / name, mixers, **options)
        again = crosshead.convert(source, tmp_path / f"{name}-again", mixers, calibration=saved, verify=False)
        assert "joint_fit" in made and "joint_fit" not in again
        assert again["tensors"] == made["tensors"]
        saved.unlink()


def test_fit_is_left_out_without_memory_or_with_routed_heads_and_default_text(text, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", **HEADS)
    options = {"verify": False, "overwrite": True}
    made = crosshead.convert(source, tmp_path / "made", ROUTED, **options)
    assert "joint_fit" not in made
    monkeypatch.setattr(joint_fit, "fits_in_memory", lambda *_: False)
    made = crosshead.convert(source, tmp_path / "made", FEWER, calibration=text, **options)
    assert made["joint_fit"].keys() == {"left_out"} and "of free memory" in made["joint_fit"]["left_out"]


def test_stored_rope_frequencies_are_not_fitted(text, tmp_path):
    source = write_stock(tmp_path / "source", **HEADS)
    options = {"calibration": text, "verify": False}
    plain = crosshead.convert(source, tmp_path / "plain", FEWER, **options)
    tensors = load_file(source / "model.safetensors")
    stored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(4) for layer in range(2)}
    save_file(tensors | stored, source / "model.safetensors", {"format": "pt"})
    made = crosshead.convert(source, tmp_path / "made", FEWER, **options)
    assert made["tensors"] == plain["tensors"] and made["dropped"].keys() == stored.keys()


OTHERS = [{"key_heads": 3, "value_heads": 3}, {"key_heads": 2, "value_heads": 3}, {"groups": 2}, {"method": "svd"}]


@pytest.mark.parametrize("changes", first([{"layers": [0]}, None, *OTHERS], 2))
def test_saved_router_does_not_fit_other_component_heads(changes, text, tmp_path):
    source = write_stock(tmp_path / "source", **HEADS)
    saved = tmp_path / "saved.safetensors"
    options = {"verify": False, "calibration": text, "save_calibration": saved}
    crosshead.convert(source, tmp_path / "made", ROUTED | FEWER, **options)
    others = {} if changes is None else {"explicit": FEWER["explicit"] | changes}
    with pytest.raises(ConversionError, match=r"does not fit \(\d\.router\.0\.5\.\S*scores is missing\)"):
        crosshead.convert(source, tmp_path / "other", ROUTED | others, calibration=saved, verify=False)


def test_jointly_fitted_tensor_of_another_shape_is_refused(text, tmp_path):
    source = write_stock(tmp_path / "source", **HEADS)
    saved, name = tmp_path / "saved.safetensors", "0.router.0.5.joint.k_proj.weight"
    crosshead.convert(source, tmp_path / "made", ROUTED, verify=False, calibration=text, save_calibration=saved)
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    save_file(tensors | {name: tensors[name].T.contiguous()}, saved, metadata)
    with pytest.raises(ConversionError, match=f"{name} has another shape"):
        crosshead.convert(source, tmp_path / "other", ROUTED, calibration=saved, verify=False)


CHOICES = [{"active": 0.75}, {"active": 0.75, "cache": 0.75}, {"cache": 0.6}]


@pytest.mark.parametrize("choice", first(CHOICES, 2))
def test_calibration_files_are_within_the_reserved_space(choice, text, tmp_path, monkeypatch):
    source = write_stock(tmp_path / "source", **HEADS)
    reserved, written = [], []
    check, fit = AtomicOutput.check_space, convert.fit_jointly

    def fit_and_measure(layers, calibration, source, stock, text, folder, *others):
        result = fit(layers, calibration, source, stock, text, folder, *others)
        written.extend(file.stat().st_size for file in folder.glob("*.safetensors"))
        return result

    monkeypatch.setattr(AtomicOutput, "check_space", lambda *values: (reserved.append(values[-1]), check(*values)))
    monkeypatch.setattr(convert, "fit_jointly", fit_and_measure)
    crosshead.convert(source, tmp_path / "made", {}, calibration=text, verify=False, **choice)
    headers = 16384 * len(written)
    assert len(written) >= 2 and sum(written) <= reserved[0] + headers
