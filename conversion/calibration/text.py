"""Sample text for calibrating a conversion and comparing models: where it comes from, and windows of its tokens."""

from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from crosshead.common.errors import ConversionError

SHORTEST_WINDOW = 32
"""Tokens: less context than this says little about a model."""
CHARACTERS_PER_TOKEN = 32
"""More than any tokenizer needs on average: how much of a long text is tokenised at all."""


def default_text() -> str:
    """The prose that every CPython carries: the texts of `help()` on the language."""
    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """The content of a text file; `ConversionError` where it is none."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConversionError(f"the text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is no UTF-8 text (byte {error.start} is not): give plain text") from error
    if "\0" in text:
        raise ConversionError(f"{path} is a binary file (it holds zero bytes): give plain text")
    if not text.strip():
        raise ConversionError(f"the text {path} is empty")
    return text


def start_tokens(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before any text: BOS for Llama, none for Qwen."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], pairs)]


def windows(tokenizer: Any, text: str, length: int, count: int, vocabulary: int) -> torch.Tensor:
    """Token ids (count, length) of windows that do not overlap, spread evenly over the text; fewer where it is short.

    Each begins with the tokenizer's start tokens, because the model was trained on sequences that do. A text too short
    for one window is one shorter window. `vocabulary` is how many tokens the model knows.
    """
    excerpt = _excerpts(text, length * CHARACTERS_PER_TOKEN, count)
    tokens = torch.tensor(tokenizer(excerpt, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    if len(tokens) < min(length, SHORTEST_WINDOW):
        raise ConversionError(
            f"the text has {len(tokens)} tokens, too few to run a model on: give at least {SHORTEST_WINDOW}"
        )
    start = torch.tensor(start_tokens(tokenizer), dtype=torch.long)[: length - 1]
    largest = int(torch.cat([start, tokens]).max())
    if largest >= vocabulary:
        raise ConversionError(
            f"the tokenizer gives the token {largest}, but the model's vocabulary ends at {vocabulary - 1}: "
            "they do not belong together"
        )
    room = length - len(start)
    whole = tokens[: max(1, len(tokens) // room) * room].view(-1, min(room, len(tokens)))
    chosen = min(count, len(whole))
    picked = whole[torch.arange(chosen) * len(whole) // chosen]
    return torch.cat([start.expand(chosen, -1), picked], dim=1)


def _excerpts(text: str, size: int, count: int) -> str:
    """The text, or as many pieces of it as asked for where they are less."""
    if len(text) <= size * count:
        return text
    starts = [index * len(text) // count for index in range(count)]
    return "".join(text[start : start + size] for start in starts)
