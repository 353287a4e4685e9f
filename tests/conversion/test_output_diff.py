import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig

import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.streamed_model import StreamedModel
from crosshead.conversion.sources.safetensors_store import SafetensorsStore
from crosshead.conversion.verification import output_diff
from crosshead.conversion.verification.output_diff import compare_decoders

TOKENS = toys.tokens(3, 11)


def save_and_stream(folder, model):
    model.save_pretrained(folder)
    return StreamedModel(SafetensorsStore(folder), AutoConfig.from_pretrained(folder), attn_implementation="eager")


def scale_values(model, scale):
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(scale)
    return model


def test_identical_models_have_zero_difference(tmp_path):
    model = save_and_stream(tmp_path, toys.stock_model("Qwen3"))
    report = compare_decoders(model, model, TOKENS)
    assert report["greatest_logit_difference"] == report["mean_logit_difference"] == report["kl_divergence"] == 0
    assert report["loss_before"] == report["loss_after"]
    assert report["greedy_agreement"] == 1
    assert (report["windows"], report["window_length"]) == (3, 11)


@pytest.mark.parametrize("positions", [4, 5, 128])
@torch.no_grad()
def test_figures_match_their_definitions(tmp_path, monkeypatch, positions):
    monkeypatch.setattr(output_diff, "POSITIONS", positions)
    one, other = toys.stock_model("Llama"), scale_values(toys.stock_model("Llama"), -1.0)
    report = compare_decoders(
        save_and_stream(tmp_path / "one", one), save_and_stream(tmp_path / "other", other), TOKENS
    )
    a, b = one(TOKENS).logits.double(), other(TOKENS).logits.double()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    losses = [functional.cross_entropy(x[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).item() for x in (a, b)]
    expected = {
        "greatest_logit_difference": (a - b).abs().max().item(),
        "mean_logit_difference": (a - b).abs().mean().item(),
        "largest_logit": a.abs().max().item(),
        "kl_divergence": (p.exp() * (p - q)).sum(-1).mean().item(),
        "loss_before": losses[0],
        "loss_after": losses[1],
        "perplexity_before": math.exp(losses[0]),
        "perplexity_after": math.exp(losses[1]),
        "greedy_agreement": (a.argmax(-1) == b.argmax(-1)).double().mean().item(),
    }
    assert expected["kl_divergence"] > 1e-4
    assert expected["greedy_agreement"] < 1
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, rel=1e-4), name


def test_added_vocabulary_rows_are_ignored(tmp_path):
    source, grown = toys.stock_model("Qwen2"), toys.stock_model("Qwen2")
    grown.resize_token_embeddings(70)
    report = compare_decoders(
        save_and_stream(tmp_path / "source", source), save_and_stream(tmp_path / "grown", grown), TOKENS
    )
    assert report["greatest_logit_difference"] < 1e-5
    assert report["kl_divergence"] < 1e-9
    assert report["greedy_agreement"] == 1


def test_progress_counts_layers_of_both_models(tmp_path):
    model, steps = save_and_stream(tmp_path, toys.stock_model("Llama")), []
    compare_decoders(model, model, TOKENS, lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_nan_logits_are_refused(tmp_path):
    sound, broken = toys.stock_model("Llama"), scale_values(toys.stock_model("Llama"), math.nan)
    sound, broken = save_and_stream(tmp_path / "sound", sound), save_and_stream(tmp_path / "broken", broken)
    with pytest.raises(ConversionError, match="converted"):
        compare_decoders(sound, broken, TOKENS)
    with pytest.raises(ConversionError, match="source"):
        compare_decoders(broken, sound, TOKENS)
