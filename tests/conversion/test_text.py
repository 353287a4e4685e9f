import pytest
import torch
from tokenizers import processors

from crosshead.common.errors import ConversionError
from crosshead.common.plain_text import end_tokens, start_tokens
from crosshead.conversion.calibration.text import default_documentation, default_text, windows
from toy_tokenizer import toy_tokenizer


def words(count):
    return " ".join(f"w{index % 60 + 1}" for index in range(count))


def test_default_text_is_multilingual_and_long_enough():
    text = default_text()
    assert len(text) > 150_000  # 23 windows of 1,024 tokens with 5 characters each, in four fifths of it
    assert len(default_documentation()) > 50_000  # 7 windows with 7 characters for each token
    assert all(word in text for word in ("the river", "def ", "Sediment", "\u0438", "\u7684"))


def test_windows_are_spread_over_text_without_overlap():
    taken = windows(toy_tokenizer(), words(60), 5, 4, 61)
    assert taken.dtype == torch.long
    assert taken[:, 0].tolist() == [1, 16, 31, 46]
    assert taken[1].tolist() == [16, 17, 18, 19, 20]


def test_windows_start_with_tokenizer_start_tokens():
    tokenizer = toy_tokenizer()
    assert start_tokens(tokenizer) == [] and end_tokens(tokenizer) == []
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="w7 w8 $A w9 w10", special_tokens=[(f"w{token}", token) for token in (7, 8, 9, 10)]
    )
    assert start_tokens(tokenizer) == [7, 8] and end_tokens(tokenizer) == [9, 10]
    taken = windows(tokenizer, words(60), 5, 4, 61)
    assert taken[:, :2].tolist() == [[7, 8]] * 4
    assert taken[:, 2].tolist() == [1, 16, 31, 46]
    assert windows(tokenizer, words(40), 100, 4, 61).shape == (1, 42)
    assert windows(tokenizer, words(40), 2, 2, 61)[:, 0].tolist() == [7, 7]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="w60 $A", special_tokens=[("w60", 60)])
    with pytest.raises(ConversionError, match="token 60"):
        windows(tokenizer, words(40), 8, 4, 60)


def test_number_of_windows_is_limited_by_text_length():
    assert windows(toy_tokenizer(), words(47), 5, 9, 61)[:, 0].tolist() == list(range(1, 46, 5))
    assert windows(toy_tokenizer(), words(47), 5, 100, 61).shape == (9, 5)


def test_only_pieces_of_long_text_are_tokenised():
    text = "x " * 100_000 + words(60)
    texts = []

    def spy(text, **options):
        texts.append(text)
        return toy_tokenizer()(text, **options)

    assert windows(spy, text, 8, 3, 61).shape == (3, 8)
    assert len(texts[0]) == 3 * 8 * 32


def test_short_text_gives_shorter_window_or_is_refused():
    assert windows(toy_tokenizer(), words(40), 100, 4, 61).shape == (1, 40)
    with pytest.raises(ConversionError, match=r"31 tokens.*32"):
        windows(toy_tokenizer(), words(31), 100, 4, 61)
    with pytest.raises(ConversionError, match="0 tokens"):
        windows(toy_tokenizer(), "", 100, 4, 61)


def test_tokens_beyond_vocabulary_are_refused():
    with pytest.raises(ConversionError, match=r"token 40.*39"):
        windows(toy_tokenizer(), words(40), 8, 4, 40)
