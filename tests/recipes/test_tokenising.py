"""Tokens on the disk against the same documents tokenised one by one."""

from functools import partial

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from crosshead.common.errors import RecipeError
from crosshead.recipes.data import tokenising
from crosshead.recipes.data.tokenising import HELD_OUT, TRAINING, TokenEncoder, is_held_out, pieces, write_tokens
from crosshead.recipes.schema.sections import DataSource
from toy_data import SEPARATOR, separating_tokenizer, toy_texts, words


@pytest.fixture(scope="module")
def encoder():
    return TokenEncoder(separating_tokenizer(), 61)


def write(encoder, documents, folder, held_out=0.0, limit=None, report=lambda: None):
    return write_tokens(documents, DataSource("texts", max_tokens=limit), encoder, held_out, folder, report)


def read_part(folder, part, dtype=np.uint16):
    """Return the documents of a part, with their separators."""
    tokens, ends = np.fromfile(folder / f"{part}.tokens", dtype), np.fromfile(folder / f"{part}.ends", np.int64)
    assert not len(tokens) or ends[-1] == len(tokens)
    return [list(document) for document in np.split(tokens, ends[:-1])] if len(ends) else []


def expected_documents(texts):
    return [[*(int(word[1:]) for word in text.split()), SEPARATOR] for text in texts]


def test_written_tokens_equal_documents_for_any_batch_size(encoder, tmp_path, monkeypatch):
    texts = toy_texts(100)
    for size in (1, 100, 10_000):
        monkeypatch.setattr(tokenising, "BATCH", size)
        reports = []
        report = partial(reports.append, size)
        records = write(encoder, [[text] for text in texts], tmp_path, report=report)
        assert read_part(tmp_path, TRAINING) == expected_documents(texts)
        assert read_part(tmp_path, HELD_OUT) == []
        assert records[TRAINING].documents == 100
        assert records[TRAINING].tokens == sum(map(len, expected_documents(texts)))
        assert (len(reports) > 10) == (size < 10_000)


def test_documents_start_with_bos_if_the_tokenizer_adds_it(encoder, tmp_path):
    tokenizer = separating_tokenizer()
    tokenizer.bos_token = "w60"
    without = TokenEncoder(tokenizer, 61)  # it has the token, but does not put it before texts
    assert without.fingerprint()["vocabulary"] == 61 and "start" not in without.fingerprint()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w60 $A", special_tokens=[("w60", 60)])
    starting = TokenEncoder(tokenizer, 61)
    assert starting.fingerprint()["start"] == [60]
    texts = [*toy_texts(20), words(60, 5, 6)]
    write(starting, [[text] for text in texts], tmp_path)
    expected = [document if document[0] == 60 else [60, *document] for document in expected_documents(texts)]
    assert read_part(tmp_path, TRAINING) == expected


def test_digest_depends_on_document_ends(encoder, tmp_path):
    one, two = [[words(1, SEPARATOR, 2)]], [[words(1)], [words(2)]]
    records = [write(encoder, documents, tmp_path)[TRAINING] for documents in (one, two)]
    assert records[0].tokens == records[1].tokens
    assert records[0].digest != records[1].digest


def test_empty_documents_are_skipped(encoder, tmp_path):
    documents = [[], [words(1)], [""], ["  ", "\n"], [words(2)]]
    write(encoder, documents, tmp_path)
    assert read_part(tmp_path, TRAINING) == expected_documents([words(1), words(2)])


def test_long_document_in_pieces_gives_same_tokens(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "PIECE", 50)
    monkeypatch.setattr(tokenising, "BATCH", 120)
    text = "\n".join(words(*range(1 + start % 40, 9 + start % 40)) for start in range(200))
    for block in (7, 50, 51, 5000, len(text)):
        blocks = [text[start : start + block] for start in range(0, len(text), block)]
        result = list(pieces([blocks, [words(3)]]))
        assert max(len(piece.text) for piece in result) <= 50
        assert "".join(piece.text for piece in result) == text + words(3)
        assert all(piece.text.endswith("\n") for piece in result if not piece.last)
        assert [piece.first for piece in result] == [True] + [piece.last for piece in result[:-1]]
        assert [piece.last for piece in result].count(True) == 2
        write(encoder, [blocks, [words(3)]], tmp_path)
        assert read_part(tmp_path, TRAINING) == expected_documents([text, words(3)])


def test_line_longer_than_a_piece_is_cut(monkeypatch):
    monkeypatch.setattr(tokenising, "PIECE", 10)
    assert [piece.text for piece in pieces([["x" * 25]])] == ["x" * 10, "x" * 10, "x" * 5]
    assert [piece.text for piece in pieces([["x", " " * 25, "y"]])] == ["x" + " " * 9, " " * 10, " " * 6 + "y"]


def test_held_out_documents_depend_only_on_their_text(encoder, tmp_path):
    texts = [words(index % 59 + 1, index // 59 + 1) for index in range(2000)]
    write(encoder, [[text] for text in texts], tmp_path, held_out=0.2)
    held_out = [text for text in texts if is_held_out(text, 0.2)]
    assert read_part(tmp_path, HELD_OUT) == expected_documents(held_out)
    assert read_part(tmp_path, TRAINING) == expected_documents([text for text in texts if text not in set(held_out)])
    assert 340 < len(held_out) < 460
    more = [text for text in [*reversed(texts), words(5)] if is_held_out(text, 0.2)]
    assert set(held_out) <= set(more)
    assert set(held_out) < {text for text in texts if is_held_out(text, 0.3)}


def test_long_document_is_wholly_in_training_or_held_out(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "PIECE", 20)
    texts = ["\n".join([words(start)] * 40) for start in range(1, 59)]
    write(encoder, [[text] for text in texts], tmp_path, held_out=0.5)
    sides = [read_part(tmp_path, part) for part in (TRAINING, HELD_OUT)]
    assert all(len(side) > 10 for side in sides)
    assert sorted(sides[0] + sides[1]) == expected_documents(texts)


def test_reading_stops_at_max_tokens(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "BATCH", 1)
    monkeypatch.setattr(tokenising, "PIECE", 20)
    yielded = []

    def documents():
        for number in range(1, 59):
            yielded.append(number)
            yield [words(number, number)]

    for limit, count in ((6, 2), (7, 3)):
        write(encoder, documents(), tmp_path, limit=limit)
        assert read_part(tmp_path, TRAINING) == expected_documents(
            [words(number, number) for number in range(1, count + 1)]
        )
    assert len(yielded) < 12


def test_document_that_reaches_max_tokens_is_kept_whole(encoder, tmp_path, monkeypatch):
    """The last document is read in several pieces here."""
    monkeypatch.setattr(tokenising, "PIECE", 20)
    texts = [words(1, 2), "\n".join(words(number) for number in range(1, 31)), words(3)]
    write(encoder, [[text] for text in texts], tmp_path, limit=31)
    assert read_part(tmp_path, TRAINING) == expected_documents(texts[:2])


def test_document_that_ends_with_the_separator_may_have_max_tokens(encoder, tmp_path):
    text = f"{words(1, 2)} w{SEPARATOR}"
    write(encoder, [[text]], tmp_path, limit=3)
    assert read_part(tmp_path, TRAINING) == [[1, 2, SEPARATOR]]
    with pytest.raises(RecipeError, match="max_tokens=2"):
        write(encoder, [[text]], tmp_path, limit=2)


@pytest.mark.parametrize("size", [20, 10_000])
def test_document_longer_than_max_tokens_is_refused(size, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "PIECE", size)
    texts = [words(1, 2), "\n".join(words(number) for number in range(1, 31)), words(3)]
    with pytest.raises(RecipeError, match=r"^texts: .*'w1 w2 w3 .*max_tokens=30"):
        write(encoder, [[text] for text in texts], tmp_path, limit=30)


def test_token_dtype_is_uint32_for_large_vocabulary(tmp_path):
    encoder = TokenEncoder(separating_tokenizer(70_000), 70_000)
    write(encoder, [[words(5, 69_999)]], tmp_path)
    assert read_part(tmp_path, TRAINING, np.uint32) == [[5, 69_999, SEPARATOR]]
    assert TokenEncoder(separating_tokenizer(), 1 << 16).dtype == np.uint16


def test_token_beyond_model_vocabulary_is_refused():
    encoder = TokenEncoder(separating_tokenizer(), 61)
    with pytest.raises(RecipeError, match=r"token 70.* 60"):
        TokenEncoder(separating_tokenizer(80), 61).encode([words(1, 70)])
    with pytest.raises(RecipeError, match=r"token 60.* 49"):
        TokenEncoder(separating_tokenizer(), 50)
    assert [list(tokens) for tokens in encoder.encode([words(60, 1)])] == [[60, 1]]


def test_tokenizer_without_eos_token_is_refused():
    tokenizer = separating_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(RecipeError, match="eos_token"):
        TokenEncoder(tokenizer, 61)


def test_encoder_adds_no_bos_token():
    tokenizer = separating_tokenizer()
    tokenizer.bos_token = "w1"
    tokenizer.add_bos_token = True
    assert [list(tokens) for tokens in TokenEncoder(tokenizer, 61).encode([words(2)])] == [[2]]


def test_tokenizer_fingerprint_does_not_depend_on_last_call():
    tokenizer = separating_tokenizer()
    before = TokenEncoder(tokenizer, 61).fingerprint()
    tokenizer.pad_token = "w1"
    padded = TokenEncoder(tokenizer, 61).fingerprint()
    tokenizer([words(1, 2), words(1)], padding=True, truncation=True, max_length=2)
    assert TokenEncoder(tokenizer, 61).fingerprint() == padded
    assert TokenEncoder(separating_tokenizer(), 61).fingerprint() == before
    assert TokenEncoder(separating_tokenizer(61), 62).fingerprint() != before
    assert TokenEncoder(separating_tokenizer(80), 61).fingerprint() != before
