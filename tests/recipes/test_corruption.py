"""Corrupted windows: statistics of masks, span corruption, and the order of segments."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from crosshead.common.errors import RecipeError
from crosshead.recipes.data.corruption import cut_spans, masked_tokens, random_sizes
from crosshead.recipes.data.training_data import Prepared
from crosshead.recipes.schema.objectives import MaskedTokens, Spans

PAD, CLS, SEP, MASK, END = 0, 1, 2, 3, 4
FIRST_WORD, VOCABULARY, SENTINELS = 5, 500, 100
IGNORED_LABEL = -100


def tokenizer(**changes):
    """Return a fake tokenizer with five special tokens, words, and sentinels at the end of the vocabulary."""
    names = ["<pad>", "<cls>", "<sep>", "<mask>", "<end>"]
    tokens = {name: number for number, name in enumerate(names)}
    tokens |= {f"w{number}": number for number in range(FIRST_WORD, VOCABULARY - SENTINELS)}
    tokens |= {f"<extra_id_{number}>": VOCABULARY - 1 - number for number in range(SENTINELS)}
    content = {
        "cls_token_id": CLS,
        "sep_token_id": SEP,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "all_special_ids": [PAD, CLS, SEP, MASK, END, *range(VOCABULARY - SENTINELS, VOCABULARY)],
        "get_vocab": lambda: tokens,
    }
    return SimpleNamespace(**content | changes)


def windows(count, length, seed=0):
    """Yield windows of ascending word ids, which identify positions; a document ends inside every second one."""
    for number in range(count):
        text = torch.arange(length) % 300 + FIRST_WORD
        if number % 2:
            text[length // 3] = SEP
        yield {"input_ids": text, "labels": text.clone()}


def masks(length=66, **options):
    return masked_tokens(MaskedTokens(**options), tokenizer(), VOCABULARY, length)


def samples(corruption, count):
    return Prepared(list(windows(count, corruption.text_length)), corruption, "training 0")


def test_masked_tokens_have_bert_shares():
    corrupted = samples(masks(), 400)
    kinds = {"masked": 0, "kept": 0, "replaced": 0}
    for sample, window in zip((corrupted[index] for index in range(400)), windows(400, 64), strict=True):
        inputs, labels = sample["input_ids"], sample["labels"]
        original = torch.cat([torch.tensor([CLS]), window["input_ids"], torch.tensor([SEP])])
        chosen = labels != IGNORED_LABEL
        assert inputs.shape == labels.shape == (66,) and set(sample) == {"input_ids", "labels"}
        assert torch.equal(inputs[~chosen], original[~chosen]) and torch.equal(labels[chosen], original[chosen])
        assert not torch.isin(labels[chosen], torch.tensor([CLS, SEP])).any()
        words = int((original >= FIRST_WORD).sum())
        assert int(chosen.sum()) == round(0.15 * words)
        kinds["masked"] += int((inputs[chosen] == MASK).sum())
        kinds["kept"] += int((inputs[chosen] == labels[chosen]).sum())
        replaced = inputs[chosen][(inputs[chosen] != MASK) & (inputs[chosen] != labels[chosen])]
        assert ((replaced >= FIRST_WORD) & (replaced < VOCABULARY - SENTINELS)).all()
        kinds["replaced"] += len(replaced)
    total = sum(kinds.values())
    for kind, share in {"masked": 0.8, "kept": 0.1, "replaced": 0.1}.items():
        assert abs(kinds[kind] - share * total) < 4 * (share * (1 - share) * total) ** 0.5, kind


def test_window_of_special_tokens_still_masks_one_token():
    corruption = masks(10)
    text = torch.full((corruption.text_length,), END)
    sample = corruption({"input_ids": text}, np.random.default_rng(0))
    assert (sample["labels"] == END).sum() == 1
    assert sample["input_ids"][0] == CLS and sample["input_ids"][-1] == SEP


def test_mask_positions_are_uniform():
    corrupted = samples(masks(share=0.25), 2000)
    counts = sum((corrupted[index]["labels"] != IGNORED_LABEL).float() for index in range(0, 2000, 2))
    assert counts[0] == counts[-1] == 0
    assert (counts[1:-1] / 1000 - 0.25).abs().max() < 5 * (0.25 * 0.75 / 1000) ** 0.5


def test_segments_are_swapped_in_half_of_the_sequences():
    corruption = masks(67, segments="order")
    assert corruption.text_length == 64  # beside [CLS] and two [SEP]
    corrupted, labels, cuts = samples(corruption, 400), [], set()
    for sample, window in zip((corrupted[index] for index in range(400)), windows(400, 64), strict=True):
        inputs, text = sample["input_ids"].clone(), window["input_ids"]
        chosen = sample["labels"] != IGNORED_LABEL
        inputs[chosen] = sample["labels"][chosen]
        size = int((sample["token_type_ids"] == 0).sum()) - 2
        assert torch.equal(sample["token_type_ids"], torch.cat([torch.zeros(size + 2), torch.ones(65 - size)]).long())
        assert inputs[0] == CLS and inputs[size + 1] == inputs[-1] == SEP
        segments = [inputs[1 : size + 1], inputs[size + 2 : -1]]
        label = int(sample["order_labels"])
        assert torch.equal(torch.cat(segments[::-1] if label else segments), text)
        cut = len(segments[label])
        assert 16 <= cut <= 48 and text[cut - 1] != SEP
        labels.append(label)
        cuts.add(cut)
    assert abs(sum(labels) - 200) < 4 * 10 and len(cuts) > 25


def test_span_inputs_and_labels_reconstruct_text():
    corruption = cut_spans(Spans(), tokenizer(), VOCABULARY, 512, PAD)
    corrupted, firsts = samples(corruption, 50), set()
    for sample, window in zip(
        (corrupted[index] for index in range(50)), windows(50, corruption.text_length), strict=True
    ):
        inputs, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert (len(inputs), len(labels)) == (512, 114)  # the numbers of the Talking-Heads paper
        assert inputs[-1] == labels[-1] == END
        assert sample["decoder_input_ids"].tolist() == [PAD, *labels[:-1]]
        spans = {}
        for token in labels[:-1]:
            if token >= VOCABULARY - SENTINELS:
                spans[token] = []
            else:
                spans[[*spans][-1]].append(token)
        assert [*spans] == [VOCABULARY - 1 - number for number in range(28)] and all(spans.values())
        assert len(corruption.sentinels) == 28 and sum(map(len, spans.values())) == round(568 * 0.15)
        text = [word for token in inputs[:-1] for word in spans.get(token, [token])]
        assert text == window["input_ids"].tolist()
        firsts.add(inputs.index(VOCABULARY - 1))
    assert len(firsts) > 10


@pytest.mark.parametrize(
    ("share", "mean", "length"), [(0.15, 3.0, 64), (0.5, 10.0, 100), (0.05, 1.0, 33), (0.9, 1.0, 40)]
)
def test_span_share_and_length_settings_give_expected_sizes(share, mean, length):
    corruption = cut_spans(Spans(share=share, mean_length=mean), tokenizer(), VOCABULARY, length, PAD)
    (sample,) = (corruption(each, np.random.default_rng(0)) for each in windows(1, corruption.text_length))
    assert length - 1 <= len(sample["input_ids"]) <= length
    noise = len(sample["labels"]) - 1 - len(corruption.sentinels)
    assert noise == round(share * corruption.text_length)


def test_random_sizes_are_uniform_over_all_divisions():
    draws = np.random.default_rng(0)
    counts = {}
    for _ in range(6000):
        sizes = tuple(random_sizes(6, 3, draws))
        assert sum(sizes) == 6 and min(sizes) >= 1
        counts[sizes] = counts.get(sizes, 0) + 1
    assert len(counts) == 10  # 2 of the 5 boundaries between 6 items
    assert max(abs(count - 600) for count in counts.values()) < 5 * 600**0.5


def test_corruption_depends_only_on_sample_number_and_seed():
    corruption = masks()
    base = list(windows(4, corruption.text_length))
    first, again, other = (Prepared(base, corruption, f"training {seed}") for seed in (0, 0, 1))
    for index in (3, 0, 2, 1):
        assert torch.equal(first[index]["input_ids"], again[index]["input_ids"])
        assert not torch.equal(first[index]["labels"], other[index]["labels"])
    assert not torch.equal(first[0]["labels"] > 0, first[2]["labels"] > 0)


@pytest.mark.parametrize(
    ("change", "options", "length", "words"),
    [
        ({"mask_token_id": None}, MaskedTokens(), 66, "mask_token"),
        ({}, MaskedTokens(), 3, "data.length=3"),
        ({"mask_token_id": VOCABULARY}, MaskedTokens(), 66, f"token {VOCABULARY}"),
        ({"get_vocab": dict}, Spans(), 66, "<extra_id_0>"),
        ({}, Spans(), 4096, "<extra_id_100>"),
        ({}, Spans(), 3, "data.length=3"),
    ],
)
def test_corruption_refuses_unsuitable_tokenizer_or_length(change, options, length, words):
    changed_tokenizer = tokenizer(**change)
    with pytest.raises(RecipeError, match=re.escape(words)):
        if isinstance(options, Spans):
            cut_spans(options, changed_tokenizer, VOCABULARY, length, PAD)
        else:
            masked_tokens(options, changed_tokenizer, VOCABULARY, length)
