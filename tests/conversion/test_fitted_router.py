"""Routers that are fitted to a pretrained model: least squares solutions, and a converted model that uses them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration import head_statistics
from crosshead.conversion.compress import fitted_router, fitted_steps, joint_fit
from crosshead.conversion.compress.fitted_router import ROUTER_RIDGE, Routing, fit_router, recorded, routed
from crosshead.conversion.sources.safetensors_store import WEIGHTS
from toy_checkpoints import write_stock

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def fit_in_float32(monkeypatch):
    for module in (head_statistics, fitted_router):
        monkeypatch.setattr(module, "fast_dtype", lambda: torch.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(" ".join(f"w{number * number % 97}" for number in range(6000)))
    return path


@pytest.fixture(scope="module")
def short_text(text):
    """A shorter text for component heads, whose statistics take longer."""
    path = text.with_name("short.txt")
    path.write_text(text.read_text()[:4000])
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_stock(tmp_path_factory.mktemp("models") / "source", **HEADS)


def record_attention(backbone, shared=0, active=3):
    """Return an attention layer, its routing, and its recorded inputs and head outputs on three texts."""
    model = toys.stock_model(backbone).eval()
    attention = model.model.layers[1].self_attn
    with recorded(attention, torch.empty(3, 1, 1)) as outputs:
        for seed in range(3):
            model(toys.tokens(batch=1, length=30, seed=seed), use_cache=False)
    return attention, Routing(shared, active), outputs


def least_squares(x, y, ridge):
    rows = (ridge * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1]).double()
    return torch.linalg.lstsq(
        torch.cat([x, rows]), torch.cat([y, torch.zeros(x.shape[1], y.shape[1]).double()])
    ).solution.T


@pytest.mark.parametrize("backbone", ["Llama", "Qwen3"])
@pytest.mark.parametrize(("shared", "active"), [(0, 3), (1, 2)])
@torch.no_grad()
def test_router_and_projection_are_least_squares_solutions(backbone, shared, active):
    attention, routing, outputs = record_attention(backbone, shared, active)
    size, weight = attention.head_dim, attention.o_proj.weight.double()
    x, heads = (torch.cat(parts).double() for parts in zip(*outputs, strict=True))
    count = heads.shape[1] // size
    parts = [heads[:, i * size : (i + 1) * size] @ weight[:, i * size : (i + 1) * size].T for i in range(count)]
    logarithms = torch.stack([part.norm(dim=1).log() for part in parts], dim=1)[:, shared:]
    scores, change = fit_router(outputs, attention.o_proj.weight, routing, size).values()
    torch.testing.assert_close(scores.double(), least_squares(x, logarithms, ROUTER_RIDGE), rtol=1e-3, atol=1e-4)
    active_outputs = torch.zeros_like(heads)
    for token, row in enumerate(x.float() @ scores.T):
        chosen = [*range(shared), *(shared + i for i in row.topk(active - shared).indices.tolist())]
        for head in chosen:
            active_outputs[token, head * size : (head + 1) * size] = heads[token, head * size : (head + 1) * size]
    expected = least_squares(active_outputs, (heads - active_outputs) @ weight.T, fitted_router.RIDGE)
    torch.testing.assert_close(change.double(), expected, rtol=1e-3, atol=1e-4)
    missing = (heads - active_outputs) @ weight.T
    assert (missing - active_outputs @ change.double().T).square().sum() < missing.square().sum()


@torch.no_grad()
def test_routed_context_removes_hooks_and_restores_projection():
    attention, routing, outputs = record_attention("Llama")
    before = attention.o_proj.weight.clone()
    fitted = fit_router(outputs, before, routing, attention.head_dim)
    with routed(attention, fitted, routing, attention.head_dim):
        assert not attention.o_proj.weight.equal(before)
    assert attention.o_proj.weight.equal(before)
    assert not attention._forward_pre_hooks and not attention.o_proj._forward_pre_hooks


@pytest.mark.parametrize("steps", [None, 0, 40], ids=["alone", "closed forms", "steps"])
@torch.no_grad()
def test_converted_model_equals_source_routed_by_hooks(steps, source, short_text, tmp_path, monkeypatch):
    """Alone and with component heads, which are fitted in closed form or by steps."""
    explicit = {} if steps is None else {"explicit": {"key_heads": 2, "value_heads": 2, "groups": 1}}
    if explicit:  # Qwen3: its output projection absorbs a map
        source = write_stock(tmp_path / "source", "Qwen3", **HEADS)
    monkeypatch.setattr(fitted_steps, "STEPS", steps or 0)
    monkeypatch.setattr(joint_fit, "MIN_DIVERGENCE", 100.0)
    saved = tmp_path / "saved.safetensors"
    mixers = explicit | {"mixture": {"active_heads": 5, "layers": [1]}}
    report = crosshead.convert(source, tmp_path / "out", mixers, calibration=short_text, save_calibration=saved)
    assert report["counts"]["created"] == 1 + 4 * bool(explicit)
    stored = load_file(saved)
    routing = Routing(0, 5, "aligned.2x2" if explicit else "")
    fitted = {name: stored[f"1.router.{name}"] for name in routing.names()}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mixers"]["mixture"]["router"] == "two_stage" and config["mixers"]["mixture"]["shared_heads"] == 0
    if explicit:
        crosshead.convert(source, tmp_path / "plain", explicit, calibration=saved, verify=False)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain" if explicit else source).eval()
    attention = plain.model.layers[1].self_attn
    tokens = toys.tokens(batch=2, length=20)
    with routed(attention, fitted, routing, attention.head_dim):
        expected = plain(tokens).logits
    torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_calibrated_router_has_lower_divergence_than_paper_router(source, text, tmp_path):
    losses = {}
    for method in ("calibrated", "paper"):
        mixers = {"mixture": {"active_heads": 5, "method": method}}
        extra = {"calibration": text} if method == "calibrated" else {}
        losses[method] = crosshead.convert(source, tmp_path / method, mixers, **extra)["verification"]["kl_divergence"]
    assert losses["calibrated"] < 0.7 * losses["paper"]


def test_saved_router_gives_same_bytes_and_refuses_other_counts(source, text, tmp_path):
    mixers, saved = {"mixture": {"active_heads": 5}}, tmp_path / "saved.safetensors"
    crosshead.convert(source, tmp_path / "first", mixers, calibration=text, save_calibration=saved, verify=False)
    crosshead.convert(source, tmp_path / "second", mixers, calibration=saved, verify=False)
    assert len({(tmp_path / name / WEIGHTS).read_bytes() for name in ("first", "second")}) == 1
    with pytest.raises(ConversionError, match=r"router\.0\.6\.scores"):
        crosshead.convert(source, tmp_path / "third", {"mixture": {"active_heads": 6}}, calibration=saved)


def test_all_heads_active_needs_no_calibration_and_is_neutral(source, tmp_path):
    report = crosshead.convert(source, tmp_path / "out", {"mixture": {"active_heads": 8}})
    assert "calibration" not in report and report["verification"]["greatest_logit_difference"] == 0


def test_layers_with_all_heads_active_are_copied(source, text, tmp_path):
    report = crosshead.convert(source, tmp_path / "out", {"mixture": {"active_heads": [8, 5]}}, calibration=text)
    assert report["tensors"]["model.layers.0.self_attn.o_proj.weight"]["fate"] == "copied"
    assert report["tensors"]["model.layers.1.self_attn.o_proj.weight"]["fate"] == "rewritten"


def test_fitted_router_with_differential_is_refused(source, tmp_path):
    with pytest.raises(ConversionError, match="differential"):
        crosshead.convert(
            source, tmp_path / "out", {"differential": {}, "mixture": {"active_heads": 3}}, allow_inexact=True
        )
