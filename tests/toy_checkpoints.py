"""Toy checkpoints on disk, the sources of conversions."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import toys

CHARACTERS = string.ascii_lowercase + string.digits + " \n.,;:'`\"()[]*_-=+<>/\\{}|"
MANY_SHARDS = 12_000
"""Shard size in bytes that splits any toy into several shards."""


def character_tokenizer() -> Any:
    """Return a tokenizer with one token per character, so that any prose gives varied tokens."""
    words = {"<unknown>": 0} | {character: index for index, character in enumerate(CHARACTERS[:60], 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_model(model: Any, folder: Path, shard_size: int | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model as a checkpoint with a character tokenizer; return its folder."""
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
    """Save a tiny stock model with a character tokenizer; return its folder."""
    return write_model(toys.stock_model(backbone, **changes), folder, shard_size, dtype)
