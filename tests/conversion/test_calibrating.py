"""Calibration text: the default text, sequences sampled from the model, and a given text."""

import pytest
import torch
from tokenizers import processors

from crosshead.conversion.architectures.families import read_config
from crosshead.conversion.calibration import text as calibrating
from crosshead.conversion.calibration.head_statistics import fast_dtype
from crosshead.conversion.calibration.streamed_model import StreamedModel
from crosshead.conversion.calibration.text import (
    DEFAULT_NAME,
    DEFAULT_WINDOWS,
    HELD_OUT,
    SEED,
    WINDOWS,
    Text,
    default_documentation,
    default_text,
    load_tokenizer,
    sampled_text,
    windows,
)
from crosshead.conversion.compress.auto_layers import TRIAL_LENGTH, TRIALS
from crosshead.conversion.sources.resolve import open_source
from crosshead.conversion.verification.verify import read_sample
from tiers import first
from toy_checkpoints import character_tokenizer, write_stock

KNOWN = 50


@pytest.fixture(scope="module", params=first(["Qwen3Moe", "Llama"]))
def source_and_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("opened")
    checkpoint = write_stock(folder / "source", request.param, max_position_embeddings=1024)
    source = open_source(checkpoint, scratch=folder)
    return source, StreamedModel(source.store, read_config(source.config, "stock", "source"))


def ignore_progress(*_):
    pass


@torch.no_grad()
def test_sampled_text_follows_model_probabilities(source_and_model):
    _, model = source_and_model
    steps = []
    sampled = sampled_text(model, (3, 9), [5, 7], KNOWN, lambda *done: steps.append(done))
    generator = torch.Generator().manual_seed(SEED)
    expected = torch.cat([torch.tensor([[5, 7]] * 3), torch.randint(KNOWN, (3, 1), generator=generator)], dim=1)
    for _ in range(6):  # without a cache
        with model.head() as head:
            probabilities = head(model.run(expected))[:, -1, :KNOWN].softmax(-1)
        draws = torch.rand(3, 1, generator=generator)
        expected = torch.cat([expected, (probabilities.cumsum(-1) <= draws).sum(-1, keepdim=True)], dim=1)
    assert torch.equal(sampled, expected)
    assert steps[-1] == (9, 9)


def test_default_calibration_batch_includes_sampled_sequences(source_and_model, monkeypatch):
    source, model = source_and_model
    monkeypatch.setattr(calibrating, "SAMPLED_SHAPE", (64, 32))
    text = Text.of(None, source)
    tokens = text.calibration_batch(source, model, ignore_progress)
    assert text.described()["text"] == f"{DEFAULT_NAME}, and sequences sampled from the model"
    assert tokens.shape == (DEFAULT_WINDOWS, 1024)
    assert torch.equal(tokens[:-2], text.windows(source, 1024, DEFAULT_WINDOWS - 2, model.config.vocab_size))
    writer = StreamedModel(source.store, model.config, fast_dtype())
    generated = sampled_text(writer, (64, 32), [], len(load_tokenizer(source)), ignore_progress)
    assert torch.equal(tokens[-2:].flatten(), generated.flatten())
    assert torch.equal(tokens, text.calibration_batch(source, model, ignore_progress))


@pytest.mark.parametrize(("backbone", "decodes"), [("Llama", True), ("Bert", False), ("T5", False)])
@pytest.mark.parametrize(("part", "count", "last"), [(0.5, 8, 4), (0.5, 5, 2), (0.25, 16, 4), (0.25, 1, 0)])
def test_default_windows_of_decoders_include_documentation(backbone, decodes, part, count, last, tmp_path):
    source = open_source(write_stock(tmp_path / "source", backbone), scratch=tmp_path)
    tokens = Text.of(None, source).windows(source, 64, count, 61, documentation=part)
    last *= decodes
    tokenizer, prose = load_tokenizer(source), default_text()
    assert torch.equal(
        tokens[: count - last], windows(tokenizer, prose[: int(len(prose) * HELD_OUT)], 64, count - last, 61)
    )
    if last:
        assert torch.equal(tokens[count - last :], windows(tokenizer, default_documentation(), 64, last, 61))


def test_calibration_batch_does_not_depend_on_free_memory(source_and_model, monkeypatch):
    source, model = source_and_model
    monkeypatch.setattr(calibrating, "SAMPLED_SHAPE", (64, 32))
    results = []
    for fits in (True, False):
        monkeypatch.setattr(calibrating, "fits_in_memory", lambda size, fits=fits: fits)
        text = Text.of(None, source)
        results.append((text.described(), text.calibration_batch(source, model, ignore_progress)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_large_model_is_calibrated_without_sampled_text(source_and_model, monkeypatch):
    source, model = source_and_model
    monkeypatch.setattr(calibrating, "MAX_SAMPLED_PARAMETERS", 1000)
    text = Text.of(None, source)
    assert text.described()["text"] == DEFAULT_NAME
    assert text.calibration_batch(source, model, ignore_progress).shape == (DEFAULT_WINDOWS, 1024)


def test_given_text_is_used_without_sampled_sequences(source_and_model, tmp_path):
    source, model = source_and_model
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"w{index % 50 + 1}" for index in range(3000)))
    text = Text.of(path, source)
    tokens = text.calibration_batch(source, model, ignore_progress)
    assert torch.equal(tokens, text.windows(source, 1024, WINDOWS, model.config.vocab_size))


def test_window_length_is_limited_by_model_context(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "SAMPLED_SHAPE", (4, 128))
    source = open_source(write_stock(tmp_path / "source", max_position_embeddings=96), scratch=tmp_path)
    model = StreamedModel(source.store, read_config(source.config, "stock", "source"))
    default_tokens = Text.of(None, source).calibration_batch(source, model, ignore_progress)
    assert default_tokens.shape == (DEFAULT_WINDOWS * 1024 // 96, 96)
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"w{index % 50 + 1}" for index in range(3000)))
    assert Text.of(path, source).calibration_batch(source, model, ignore_progress).shape[1] == 96
    assert read_sample(source, None).tokens.shape[1] == 96


def test_all_windows_start_with_tokenizer_start_token(tmp_path, monkeypatch):
    """Windows for calibration, the choice of layers and verification start with the tokenizer's first token."""
    monkeypatch.setattr(calibrating, "SAMPLED_SHAPE", (64, 32))
    tokenizer = character_tokenizer()
    first = tokenizer.convert_tokens_to_ids("z")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="z $A", special_tokens=[("z", first)]
    )
    folder = write_stock(tmp_path / "source")
    tokenizer.save_pretrained(folder)
    source = open_source(folder, scratch=tmp_path)
    model = StreamedModel(source.store, read_config(source.config, "stock", "source"))
    path = tmp_path / "own.txt"
    path.write_text("the quick brown fox " * 999)
    texts = [
        *(Text.of(origin, source).calibration_batch(source, model, ignore_progress) for origin in (None, path)),
        Text.of(path, source).windows(source, TRIAL_LENGTH, TRIALS, 61),
        read_sample(source, None).tokens,
    ]
    for tokens in texts:
        assert len(tokens) > 1
        assert (tokens[:, 0] == first).all()
        assert not (tokens[:, 1] == first).all()
