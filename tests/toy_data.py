"""Text for toy models, in the kinds of files that training reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from toy_tokenizer import toy_tokenizer

SEPARATOR = 60


def separating_tokenizer(vocabulary: int = 61) -> Any:
    """The toy tokenizer with token 60 at the end of documents; `w5` is token 5."""
    tokenizer = toy_tokenizer(vocabulary)
    tokenizer.eos_token = f"w{SEPARATOR}"
    return tokenizer


def words(*tokens: int) -> str:
    """A text of these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def toy_texts(count: int, longest: int = 12) -> list[str]:
    """Documents of 1, 2, ... tokens, over and over; any two differ while they are not many."""
    return [
        words(*((7 * index + 3 * place) % 58 + 1 for place in range(index % longest + 1))) for index in range(count)
    ]


def write_jsonl(path: Path, texts: list[Any], column: str = "text") -> Path:
    """One object a line."""
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def write_parquet(path: Path, texts: list[Any], column: str = "text") -> Path:
    """One row each."""
    parquet.write_table(pyarrow.table({"number": list(range(len(texts))), column: texts}), path, row_group_size=3)
    return path
