"""The text that two models are compared on, as the source's tokens."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .calibrating import DEFAULT_NAME, HELD_OUT, load_tokenizer
from .families import kind_of, read_config
from .sources import Source
from .text import default_text, read_text, windows

LENGTH, WINDOWS = 256, 4


@dataclass(frozen=True)
class Sample:
    """Windows of tokens, and what they are of."""

    tokens: torch.Tensor
    """(B, T)"""
    text: str
    """How the record names the text."""


def read_sample(source: Source, text: Path | None) -> Sample:
    """A file's text, or of the default text the part that calibration does not read."""
    prose = _held_out() if text is None else read_text(text)
    config = read_config(source.config, kind_of(source.config), source.origin["name"])
    tokens = windows(load_tokenizer(source), prose, LENGTH, WINDOWS, config.vocab_size)
    return Sample(tokens, DEFAULT_NAME if text is None else text.name)


def _held_out() -> str:
    text = default_text()
    return text[int(len(text) * HELD_OUT) :]
