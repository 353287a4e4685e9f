"""A tokenizer for toy models."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def toy_tokenizer(vocabulary: int = 61) -> Any:
    """Return a tokenizer that splits at spaces: `w5` is token 5, every unknown word is token 0."""
    words = {"<unknown>": 0} | {f"w{index}": index for index in range(1, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
