"""Text data for toy models, in the file formats that training reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from toy_tokenizer import toy_tokenizer

SEPARATOR = 60


def separating_tokenizer(vocabulary: int = 61) -> Any:
    """Return the toy tokenizer with token 60 as EOS token; `w5` is token 5."""
    tokenizer = toy_tokenizer(vocabulary)
    tokenizer.eos_token = f"w{SEPARATOR}"
    return tokenizer


def words(*tokens: int) -> str:
    """Return a text that the toy tokenizer encodes as these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def toy_texts(count: int, longest: int = 12) -> list[str]:
    """Return documents of 1, 2, ..., `longest`, 1, 2, ... tokens; distinct unless `count` is large."""
    return [words(*((7 * i + 3 * j) % 58 + 1 for j in range(i % longest + 1))) for i in range(count)]


def write_jsonl(path: Path, texts: list[Any], column: str = "text") -> Path:
    """Write one JSON object per text; return the path."""
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def write_parquet(path: Path, texts: list[Any], column: str = "text") -> Path:
    """Write one row per text, in row groups of 3; return the path."""
    parquet.write_table(pyarrow.table({"number": list(range(len(texts))), column: texts}), path, row_group_size=3)
    return path
