"""The data of a run: training samples for any number of processes, held-out data, and the fingerprint."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.tokenising import is_held_out
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.sections import DataOptions, DataSource
from toy_data import SEPARATOR, separating_tokenizer, toy_texts, words, write_jsonl, write_parquet


@pytest.fixture
def options(tmp_path):
    """Options with two sources that have no window in common."""
    first = write_jsonl(tmp_path / "first.jsonl", [words(*([token] * 9)) for token in range(1, 25)])
    second = write_parquet(tmp_path / "second.parquet", [words(*([token] * 9)) for token in range(30, 50)])
    sources = DataSource(str(first), "jsonl", weight=3), DataSource(str(second), "parquet", weight=1)
    return DataOptions(sources, length=10, cache=str(tmp_path / "cache"))


def opened(options, **changes):
    return open_data(replace(options, **changes), separating_tokenizer(), 61)


def first_tokens(samples):
    return [int(sample["input_ids"][0]) for sample in samples]


def test_a_run_sees_every_window_of_each_source_once_an_epoch_by_the_weights(options):
    data = opened(options)
    assert sum(map(len, data.sources)) == 24 + 20
    tokens = first_tokens(data.samples(160, seed=1))
    assert Counter(token for token in tokens if token < 25) == dict.fromkeys(range(1, 25), 5)
    assert Counter(token for token in tokens if token > 25) == dict.fromkeys(range(30, 50), 2)
    assert sum(token < 25 for token in tokens[:40]) == 30


def test_the_run_is_the_same_for_any_length_and_any_beginning(options):
    data = opened(options)
    whole = first_tokens(data.samples(100, seed=1))
    assert first_tokens(data.samples(60, seed=1)) == whole[:60]
    assert int(opened(options).samples(100, seed=1)[77]["input_ids"][0]) == whole[77]
    assert first_tokens(data.samples(100, seed=2)) != whole
    with pytest.raises(IndexError):
        data.samples(60, seed=1)[60]


@pytest.mark.parametrize(("processes", "batch"), [(1, 8), (2, 4), (1, 2), (4, 1), (2, 2)])
def test_a_step_takes_the_same_samples_in_any_number_of_processes(options, processes, batch):
    samples = opened(options).samples(48, seed=1)
    sampler = BatchSampler(SequentialSampler(samples), batch, drop_last=True)
    shards = [list(BatchSamplerShard(sampler, processes, process)) for process in range(processes)]
    micro = 8 // (processes * batch)
    for step in range(6):
        taken = [index for shard in shards for group in shard[step * micro : (step + 1) * micro] for index in group]
        assert sorted(taken) == list(range(8 * step, 8 * step + 8))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_through_a_loader(options, workers):
    samples = opened(options, separate_documents=True).samples(12, seed=1)
    batches = list(DataLoader(samples, batch_size=4, num_workers=workers))
    assert [set(batch) for batch in batches] == [{"input_ids", "labels", "position_ids"}] * 3
    assert torch.cat([batch["input_ids"] for batch in batches]).equal(
        torch.stack([sample["input_ids"] for sample in samples])
    )
    assert pickle.loads(pickle.dumps(samples))[3]["input_ids"].equal(samples[3]["input_ids"])


def test_what_is_held_out_is_never_trained_on(options):
    data = opened(options, held_out=0.3)
    expected = {token for token in [*range(1, 25), *range(30, 50)] if is_held_out(words(*([token] * 9)), 0.3)}
    assert set(first_tokens(data.evaluation)) == expected
    assert len(data.evaluation) == len(expected) > 5
    assert set(first_tokens(data.samples(300, seed=0))) == {*range(1, 25), *range(30, 50)} - expected
    assert opened(options).evaluation is None


def test_more_to_evaluate_on(options, tmp_path):
    tokens = list(range(2, 40))
    more = DataSource(str(write_jsonl(tmp_path / "more.jsonl", [words(*([token] * 9)) for token in tokens])), "jsonl")
    assert first_tokens(opened(options, evaluation=(more,)).evaluation) == tokens
    assert first_tokens(opened(options, held_out=0.3, evaluation=(more,)).evaluation)[-len(tokens) :] == tokens


def test_a_window_may_hold_several_documents_and_a_document_several_windows(options, tmp_path):
    path = write_jsonl(tmp_path / "mixed.jsonl", toy_texts(50, longest=40))
    data = opened(options, sources=(DataSource(str(path), "jsonl"),), separate_documents=True)
    count = sum(map(len, data.sources))
    samples = [data.samples(count, seed=0)[index] for index in range(count)]
    begun = [int((sample["position_ids"] == 0).sum()) for sample in samples]
    assert min(begun) == 1 and max(begun) > 2
    ends = sum(int((sample["input_ids"] == SEPARATOR).sum()) for sample in samples)
    assert ends in (49, 50)


def test_the_fingerprint_is_that_of_the_samples(options, tmp_path):
    first = opened(options).fingerprint
    assert opened(options).fingerprint == first
    assert opened(options, cache=str(tmp_path / "elsewhere")).fingerprint == first
    moved = (tmp_path / "first.jsonl").rename(tmp_path / "moved.jsonl")
    again = (replace(options.sources[0], path=str(moved)), options.sources[1])
    assert opened(options, sources=again).fingerprint == first
    weighted = (replace(again[0], weight=2), again[1])
    fingerprints = [first, opened(options, sources=weighted).fingerprint]
    fingerprints += [
        opened(options, sources=again, **changes).fingerprint for changes in ({"length": 9}, {"held_out": 0.3})
    ]
    fingerprints += [opened(options, sources=again, separate_documents=True).fingerprint]
    write_jsonl(moved, ["w5 w6", *[words(*([token] * 9)) for token in range(1, 25)]])
    fingerprints += [opened(options, sources=again).fingerprint]
    assert len(set(fingerprints)) == len(fingerprints)


def test_progress_names_the_source(options):
    reports = []
    open_data(options, separating_tokenizer(), 61, lambda *progress: reports.append(progress))
    assert [source for source, _, _ in reports] == [source.path for source in options.sources]
    assert all(done == total > 0 for _, done, total in reports)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1000}, r"first\.jsonl.*240.*length=1000"),
        ({"held_out": 0.999}, "length=10"),
        ({"held_out": 1e-9}, r"held_out=1e-09.*length=10"),
    ],
)
def test_too_little_for_one_window(options, changes, message):
    with pytest.raises(RecipeError, match=message) as caught:
        opened(options, **changes)
    assert "\n" not in str(caught.value)
