"""Toy checkpoints on disk, as a conversion finds them."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import toys

CHARACTERS = string.ascii_lowercase + string.digits + " \n.,;:'`\"()[]*_-=+<>/\\{}|"
MANY_SHARDS = 12_000
"""Bytes: small enough for several shards of any toy."""


def character_tokenizer() -> Any:
    """One token a character, so that any prose gives varied tokens."""
    words = {"<unknown>": 0} | {character: index for index, character in enumerate(CHARACTERS[:60], 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_model(model: Any, folder: Path, shard_size: int | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """A model as a checkpoint with its tokenizer."""
    options = {} if shard_size is None else {"max_shard_size": shard_size}
    model.config.dtype = dtype
    model.to(dtype).save_pretrained(folder, **options)
    character_tokenizer().save_pretrained(folder)
    return folder


def write_stock(
    folder: Path,
    backbone: str = "Llama",
    shard_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """A stock toy."""
    return write_model(toys.stock_model(backbone, **changes), folder, shard_size, dtype)
