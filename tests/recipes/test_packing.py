"""Windows against a slow reference, and models on packed documents against the same documents alone."""

import pickle
from dataclasses import replace
from itertools import pairwise
from math import isfinite

import pytest
import torch
from torch.utils.data import default_collate

from crosshead.modeling.model import IGNORED_LABEL
from crosshead.recipes.data.token_cache import TokenStream
from crosshead.recipes.data.tokenising import TRAINING, TokenEncoder, write_tokens
from crosshead.recipes.data.training_data import Windows
from crosshead.recipes.schema.sections import DataSource
from toy_data import SEPARATOR, separating_tokenizer, toy_texts, words, write_jsonl
from toy_training import KNOCKING, losses, toy_run, train
from toys import CASES, mixed_model


def write_token_stream(folder, texts):
    encoder = TokenEncoder(separating_tokenizer(), 61)
    write_tokens([[text] for text in texts], DataSource("texts"), encoder, 0.0, folder, lambda: None)
    return TokenStream(folder, TRAINING, encoder.dtype)


def reference_windows(texts, length):
    """Return (token, position, label) of each entry, window by window, computed in a loop."""
    entries = []
    for text in texts:
        document = [*(int(word[1:]) for word in text.split()), SEPARATOR]
        for index, token in enumerate(document):
            begins = index == 0 or len(entries) % length == 0
            position = 0 if begins else entries[-1][1] + 1
            entries.append((token, position, IGNORED_LABEL if begins else token))
    return [entries[start : start + length] for start in range(0, len(entries) - length + 1, length)]


@pytest.mark.parametrize("length", [2, 3, 7, 16, 50])
def test_windows_with_separate_documents(tmp_path, length):
    texts = [*toy_texts(60), words(*range(1, 60)), *toy_texts(5)]
    windows = Windows(write_token_stream(tmp_path, texts), length, separate_documents=True)
    expected = reference_windows(texts, length)
    assert len(windows) == len(expected) > 5
    for sample, entries in zip((windows[index] for index in range(len(windows))), expected, strict=True):
        keys = "input_ids", "position_ids", "labels"
        assert list(zip(*(sample[key].tolist() for key in keys), strict=True)) == entries
        assert all(sample[key].dtype == torch.int64 for key in keys)


def test_windows_without_separate_documents(tmp_path):
    texts = toy_texts(60)
    windows = Windows(write_token_stream(tmp_path, texts), 7, separate_documents=False)
    for index, entries in enumerate(reference_windows(texts, 7)):
        sample = windows[index]
        tokens = [token for token, _, _ in entries]
        assert set(sample) == {"input_ids", "labels"}
        assert sample["input_ids"].tolist() == tokens
        assert sample["labels"].tolist() == [IGNORED_LABEL, *tokens[1:]]


def test_index_beyond_last_window_raises(tmp_path):
    tokens = write_token_stream(tmp_path, toy_texts(20))
    windows = Windows(tokens, 9, separate_documents=False)
    assert len(list(windows)) == len(windows) == len(tokens.tokens) // 9
    assert len(tokens.tokens) % 9 > 1
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_writing_to_a_sample_keeps_the_windows(tmp_path):
    windows = Windows(write_token_stream(tmp_path, toy_texts(20)), 7, separate_documents=False)
    before = windows[0]["input_ids"].clone()
    windows[0]["input_ids"].zero_()
    assert windows[0]["input_ids"].equal(before)


def test_pickled_windows_hold_path_not_tokens(tmp_path):
    windows = Windows(write_token_stream(tmp_path, toy_texts(3000)), 7, separate_documents=True)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000 < len(windows)
    assert pickle.loads(sent)[99]["input_ids"].equal(windows[99]["input_ids"])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_packed_batch_equals_documents_run_alone(tmp_path, case):
    texts = toy_texts(40)
    windows = Windows(write_token_stream(tmp_path, texts), 16, separate_documents=True)
    batch = default_collate([windows[index] for index in range(4)])
    model = mixed_model("Llama", CASES[case])
    out = model(**batch, use_cache=False)
    losses = []
    for ids, positions, logits in zip(batch["input_ids"], batch["position_ids"], out.logits, strict=True):
        starts = [*positions.eq(0).nonzero().flatten().tolist(), 16]
        assert len(starts) > 2
        for begin, end in pairwise(starts):
            alone = model(ids[None, begin:end]).logits[0]
            assert (alone - logits[begin:end]).abs().max() < 1e-4
            losses.append(torch.nn.functional.cross_entropy(alone[:-1], ids[begin + 1 : end], reduction="none"))
    tokens = torch.cat(losses)
    assert len(tokens) == (batch["labels"] != IGNORED_LABEL).sum()
    balance = 0.0 if out.balance_loss is None else 0.01 * out.balance_loss
    assert abs(tokens.mean() + balance - out.loss) < 1e-5


def test_step_without_predictions_has_zero_loss(tmp_path):
    """A window with only the end of one document and the start of the next has nothing to predict."""
    write_jsonl(tmp_path / "two.jsonl", [2 * chr(97 + index % 26) for index in range(60)])
    recipe = toy_run(KNOCKING, tmp_path)
    sources = (DataSource(str(tmp_path / "two.jsonl"), "jsonl"),)
    data = replace(recipe.data, separate_documents=True, length=2, sources=sources, evaluation=())
    options = replace(recipe.train, tokens=24, batch_tokens=2, micro_batch=1)
    recipe = replace(recipe, data=data, train=options, watch=replace(recipe.watch, evaluate_every=None))
    train(recipe)
    values = losses(recipe)
    assert len(values) == 12 and all(isfinite(loss) for loss in values) and 0.0 in values
