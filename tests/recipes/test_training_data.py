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


def open_training_data(options, **changes):
    return open_data(replace(options, **changes), separating_tokenizer(), 61)


def first_tokens(samples):
    return [int(sample["input_ids"][0]) for sample in samples]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_holding_out_a_part_of_one_document_says_that_documents_are_not_divided(share, tmp_path):
    (tmp_path / "book.txt").write_text(words(*range(1, 60)) * 20)
    options = DataOptions((DataSource(str(tmp_path / "book.txt")),), length=10, held_out=share, cache=str(tmp_path))
    with pytest.raises(RecipeError, match=r"documents are never divided, and the sources have 1$"):
        open_training_data(options)


def test_epochs_cover_each_source_once_in_proportion_to_weights(options):
    data = open_training_data(options)
    assert sum(map(len, data.sources)) == 24 + 20
    tokens = first_tokens(data.samples(160, seed=1))
    assert Counter(token for token in tokens if token < 25) == dict.fromkeys(range(1, 25), 5)
    assert Counter(token for token in tokens if token > 25) == dict.fromkeys(range(30, 50), 2)
    assert sum(token < 25 for token in tokens[:40]) == 30


def test_sample_sequence_does_not_depend_on_run_length_or_start(options):
    data = open_training_data(options)
    whole = first_tokens(data.samples(100, seed=1))
    assert first_tokens(data.samples(60, seed=1)) == whole[:60]
    assert int(open_training_data(options).samples(100, seed=1)[77]["input_ids"][0]) == whole[77]
    assert first_tokens(data.samples(100, seed=2)) != whole
    with pytest.raises(IndexError):
        data.samples(60, seed=1)[60]


@pytest.mark.parametrize(("processes", "batch"), [(1, 8), (2, 4), (1, 2), (4, 1), (2, 2)])
def test_step_samples_do_not_depend_on_number_of_processes(options, processes, batch):
    samples = open_training_data(options).samples(48, seed=1)
    sampler = BatchSampler(SequentialSampler(samples), batch, drop_last=True)
    shards = [list(BatchSamplerShard(sampler, processes, process)) for process in range(processes)]
    micro = 8 // (processes * batch)
    for step in range(6):
        taken = [index for shard in shards for group in shard[step * micro : (step + 1) * micro] for index in group]
        assert sorted(taken) == list(range(8 * step, 8 * step + 8))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_batches_equal_samples(options, workers):
    samples = open_training_data(options, separate_documents=True).samples(12, seed=1)
    batches = list(DataLoader(samples, batch_size=4, num_workers=workers))
    assert [set(batch) for batch in batches] == [{"input_ids", "labels", "position_ids"}] * 3
    assert torch.cat([batch["input_ids"] for batch in batches]).equal(
        torch.stack([sample["input_ids"] for sample in samples])
    )
    assert pickle.loads(pickle.dumps(samples))[3]["input_ids"].equal(samples[3]["input_ids"])


def test_held_out_documents_are_not_in_training_samples(options):
    data = open_training_data(options, held_out=0.3)
    expected = {token for token in [*range(1, 25), *range(30, 50)] if is_held_out(words(*([token] * 9)), 0.3)}
    assert set(first_tokens(data.evaluation)) == expected
    assert len(data.evaluation) == len(expected) > 5
    assert set(first_tokens(data.samples(300, seed=0))) == {*range(1, 25), *range(30, 50)} - expected
    assert open_training_data(options).evaluation is None


def test_evaluation_sources_follow_held_out_windows(options, tmp_path):
    tokens = list(range(2, 40))
    more = DataSource(str(write_jsonl(tmp_path / "more.jsonl", [words(*([token] * 9)) for token in tokens])), "jsonl")
    assert first_tokens(open_training_data(options, evaluation=(more,)).evaluation) == tokens
    assert (
        first_tokens(open_training_data(options, held_out=0.3, evaluation=(more,)).evaluation)[-len(tokens) :]
        == tokens
    )


def test_windows_span_documents_and_documents_span_windows(options, tmp_path):
    path = write_jsonl(tmp_path / "mixed.jsonl", toy_texts(50, longest=40))
    data = open_training_data(options, sources=(DataSource(str(path), "jsonl"),), separate_documents=True)
    count = sum(map(len, data.sources))
    samples = [data.samples(count, seed=0)[index] for index in range(count)]
    begun = [int((sample["position_ids"] == 0).sum()) for sample in samples]
    assert min(begun) == 1 and max(begun) > 2
    ends = sum(int((sample["input_ids"] == SEPARATOR).sum()) for sample in samples)
    assert ends in (49, 50)


def test_data_fingerprint_changes_only_with_samples(options, tmp_path):
    first = open_training_data(options).fingerprint
    assert open_training_data(options).fingerprint == first
    assert open_training_data(options, cache=str(tmp_path / "elsewhere")).fingerprint == first
    moved = (tmp_path / "first.jsonl").rename(tmp_path / "moved.jsonl")
    again = (replace(options.sources[0], path=str(moved)), options.sources[1])
    assert open_training_data(options, sources=again).fingerprint == first
    weighted = (replace(again[0], weight=2), again[1])
    fingerprints = [first, open_training_data(options, sources=weighted).fingerprint]
    fingerprints += [
        open_training_data(options, sources=again, **changes).fingerprint
        for changes in ({"length": 9}, {"held_out": 0.3})
    ]
    fingerprints += [open_training_data(options, sources=again, separate_documents=True).fingerprint]
    write_jsonl(moved, ["w5 w6", *[words(*([token] * 9)) for token in range(1, 25)]])
    fingerprints += [open_training_data(options, sources=again).fingerprint]
    assert len(set(fingerprints)) == len(fingerprints)


def test_progress_reports_name_the_source(options):
    reports = []
    open_data(options, separating_tokenizer(), 61, lambda *progress: reports.append(progress))
    assert [source for source, *_ in reports] == [source.path for source in options.sources]
    assert all(done == total > 0 for _, done, total, _ in reports)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1000}, r"first\.jsonl.*240.*length=1000"),
        ({"held_out": 0.999}, "length=10"),
        ({"held_out": 1e-9}, r"held_out=1e-09.*length=10"),
    ],
)
def test_data_shorter_than_one_window_is_refused(options, changes, message):
    with pytest.raises(RecipeError, match=message) as caught:
        open_training_data(options, **changes)
    assert "\n" not in str(caught.value)
