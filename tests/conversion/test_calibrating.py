"""What a conversion reads where no text is given: prose, random tokens, and what the model writes."""

import pytest
import torch

from crosshead.conversion import calibrating
from crosshead.conversion.calibrating import PROSE, REPLACED, WINDOWS, Text, load_tokenizer
from crosshead.conversion.families import read_config
from crosshead.conversion.fast_arithmetic import fast_dtype
from crosshead.conversion.sampled_text import SEED, sampled_text
from crosshead.conversion.sources import open_source
from crosshead.conversion.streamed_model import StreamedModel
from tiers import first
from toy_checkpoints import write_stock

KNOWN = 50


@pytest.fixture(scope="module", params=first(["Qwen3Moe", "Llama"]))
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("opened")
    source = open_source(write_stock(folder / "source", request.param), scratch=folder)
    return source, StreamedModel(source.store, read_config(source.config, "stock", "source"))


def silent(*_):
    pass


@torch.no_grad()
def test_a_model_writes_what_it_predicts(opened):
    _, model = opened
    steps = []
    found = sampled_text(model, (3, 9), KNOWN, lambda *done: steps.append(done))
    generator = torch.Generator().manual_seed(SEED)
    wanted = torch.randint(KNOWN, (3, 1), generator=generator)
    for _ in range(8):  # without a cache
        with model.head() as head:
            chances = head(model.run(wanted))[:, -1, :KNOWN].softmax(-1)
        luck = torch.rand(3, 1, generator=generator)
        wanted = torch.cat([wanted, (chances.cumsum(-1) <= luck).sum(-1, keepdim=True)], dim=1)
    assert torch.equal(found, wanted)
    assert steps[-1] == (9, 9)


def test_prose_random_tokens_and_the_models_own_words(opened, monkeypatch):
    source, model = opened
    monkeypatch.setattr(calibrating, "WRITTEN", (64, 32))
    text = Text.of(None, source)
    found = text.to_calibrate_on(source, model, silent)
    assert text.described()["text"].endswith(", with random tokens in it, and what the model writes")
    assert found.shape == (PROSE + 2, 1024)
    prose = text.windows(source, 1024, PROSE, model.config.vocab_size)
    assert (found[:-2] == prose).float().mean() == pytest.approx(1 - REPLACED, abs=0.05)
    writer = StreamedModel(source.store, model.config, fast_dtype())
    written = sampled_text(writer, (64, 32), len(load_tokenizer(source)), silent)
    assert torch.equal(found[-2:].flatten(), written.flatten())
    assert torch.equal(found, text.to_calibrate_on(source, model, silent))


def test_a_model_too_large_for_the_memory_writes_nothing(opened, monkeypatch):
    source, model = opened
    monkeypatch.setattr(calibrating, "fits_in_memory", lambda size: False)
    text = Text.of(None, source)
    assert text.described()["text"].endswith("Python's own help texts, with random tokens in it")
    assert text.to_calibrate_on(source, model, silent).shape == (PROSE, 1024)


def test_a_text_that_is_given_stays_as_it_is(opened, tmp_path):
    source, model = opened
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"w{index % 50 + 1}" for index in range(3000)))
    text = Text.of(path, source)
    found = text.to_calibrate_on(source, model, silent)
    assert torch.equal(found, text.windows(source, 1024, WINDOWS, model.config.vocab_size))
