"""The tokenizer inside a GGUF file, taken out by transformers."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, GenerationConfig

from .errors import ConversionError, one_line
from .gguf_store import GgufStore

OLDEST_TRANSFORMERS = (5, 18)
"""Before it, special tokens were mixed up or missing, and Llama 3's numbers were split in other places."""


def write_side_files(store: GgufStore, folder: Path) -> None:
    """Write the tokenizer's files into `folder`, and what generation needs of the configuration."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST_TRANSFORMERS:
        raise ConversionError(
            f"transformers {transformers.__version__} gets the tokenizers of GGUF files wrong: use 5.18 or later"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _load(store, folder).save_pretrained(folder)
    ids = {name: value for name, value in store.config.items() if name.endswith("_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)


def _load(store: GgufStore, folder: Path) -> Any:
    path, metadata = store.file.paths[0], store.file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ConversionError(f"{path} has no tokenizer: convert the checkpoint that it was made from")
    # Alone in a folder, so that nothing which lies beside the file has a say.
    link = folder / "gguf" / "model.gguf"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(path.absolute())
    # transformers reads these from 5.23 on. Older files do not say them: for a sentencepiece model, yes is meant.
    first = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    last = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    try:
        return AutoTokenizer.from_pretrained(
            link.parent, gguf_file=link.name, add_bos_token=first, add_eos_token=last, trust_remote_code=False
        )
    except Exception as error:  # the metadata may hold anything, and the library checks it in many ways
        raise ConversionError(f"{path} has a tokenizer that transformers cannot read: {one_line(error)}") from error
