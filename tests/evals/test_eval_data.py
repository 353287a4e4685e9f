"""The data of the offline suite is balanced, and no heuristic on words or lengths beats chance."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from crosshead.evals.harness.tasks import TASKS

AGREEMENT = {"verb", "phrase", "clause", "determiner", "reflexive", "there"}
ORDER = {"noun_phrase", "adjective", "auxiliary", "question", "preposition", "negation"}


@pytest.fixture(scope="module")
def items():
    return [json.loads(line) for line in (TASKS / "crosshead_grammar.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data():
    spec = importlib.util.spec_from_file_location("offline_data", TASKS / "offline_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def right_and_wrong(item):
    right, wrong = item["choices"][item["label"]], item["choices"][1 - item["label"]]
    return right.split(), wrong.split()


def test_families_numbers_and_labels_are_balanced(items):
    cells = Counter((item["family"], item["number"], item["label"]) for item in items)
    assert set(cells.values()) == {5}
    assert len(cells) == len(AGREEMENT | ORDER) * 4
    assert len(items) == 240


def test_first_items_are_balanced(items):
    for count in (24, 48, 120):
        part = items[:count]
        for key in ("family", "number", "label"):
            assert len(set(Counter(item[key] for item in part).values())) == 1


def test_right_sentences_are_unique(items):
    assert len({item["choices"][item["label"]] for item in items}) == len(items)
    assert all(len(set(item["choices"])) == 2 for item in items)


def test_agreement_items_differ_in_one_balanced_word(items):
    """A model that goes by the word alone, or by its length, is right half of the time."""
    words = Counter()
    for item in items:
        if item["family"] in AGREEMENT:
            right, wrong = right_and_wrong(item)
            (pair,) = [(one, other) for one, other in zip(right, wrong, strict=True) if one != other]
            words[item["family"], *pair] += 1
    assert all(words[family, other, one] == count for (family, one, other), count in words.items())


def test_order_items_permute_words_after_the_first(items):
    for item in items:
        if item["family"] in ORDER:
            right, wrong = (" ".join(words).rstrip(".?").split() for words in right_and_wrong(item))
            assert right[0] == wrong[0]
            assert sorted(right) == sorted(wrong)


def test_loaders_of_grammar_and_prose_data(items, data):
    assert list(data.grammar(version=1)["test"]) == items
    documents = list(data.prose(version=1)["test"])
    assert len(documents) > 30
    assert all(data.MINIMUM <= len(each["text"]) <= data.MAXIMUM for each in documents)
    assert data.beginning("one\n\ntwo") == "one\n\ntwo"
    assert data.beginning("a" * 900 + "\n\n" + "b" * 900) == "a" * 900
    assert data.beginning("a" * 2000) == ""


def test_package_data_includes_suites_and_tasks():
    content = Path(__file__).resolve().parents[2].joinpath("pyproject.toml").read_text()
    assert '"suites/*.yaml", "tasks/*"' in content
