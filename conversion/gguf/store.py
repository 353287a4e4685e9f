"""Opens a GGUF file as a store of stock tensors, dequantised when they are read, and extracts its tokenizer."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoTokenizer, GenerationConfig

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError, one_line

from ..sources.tensor_store import DTYPES, Entry, shard_names, tensor_bytes
from .config import read_architecture, stock_config
from .header import GgufTensor, read_gguf
from .tensors import ROPE_FACTORS, StockTensor, check_format, depth, head_count_key, stock_names
from .tokenizer import SPACE, correct_tokens, further_templates, pre_tokeniser

MAX_SHARD = 2_000_000_000
"""Maximum size of a shard in bytes; a larger tensor gets a shard of its own."""
OLDEST_TRANSFORMERS = (5, 18)
"""Earlier versions mix up or omit special tokens of GGUF files, and split Llama 3's numbers differently."""


class GgufStore:
    """The stock tensors of a GGUF file as a `TensorStore`, and the config that its metadata describes."""

    def __init__(self, path: Path) -> None:
        require_gguf()
        self.file = read_gguf(path)
        self.paths = self.file.paths
        for name, tensor in self.file.tensors.items():
            check_format(name, tensor)
        factors = self.file.tensors.get(ROPE_FACTORS)
        rope_factors = None if factors is None else torch.cat([*StockTensor(factors).blocks()]).flatten().tolist()
        self.config = stock_config(self.file, rope_factors)
        self.dropped = {} if factors is None else {ROPE_FACTORS: "config.json has them in rope_parameters"}
        """Name of a tensor of the file that is not in the store -> the reason."""
        self._tensors: dict[str, StockTensor] = {}
        for name in sorted((name for name in self.file.tensors if name not in self.dropped), key=depth):
            self._tensors |= self._stock_tensors(name)
        self.entries: Mapping[str, Entry] = {name: tensor.entry(name) for name, tensor in self._tensors.items()}
        self.shards: Mapping[str, list[str]] = shard_names(self.entries, MAX_SHARD)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, dequantised."""
        entry = self.entries[name]
        values = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        row = 0
        for block in self._tensors[name].blocks():
            values[row : row + len(block)] = block
            row += len(block)
        return values

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of one tensor, dequantised, about a megabyte at a time."""
        for block in self._tensors[name].blocks():
            yield tensor_bytes(block)

    def fingerprint(self) -> str:
        """Return a cheap fingerprint of the files: a hash of names, sizes, modification times and headers."""
        states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.file.paths]
        table = [(name, str(tensor.format), tensor.shape, tensor.start) for name, tensor in self.file.tensors.items()]
        return hashlib.sha256(repr((states, self.file.metadata, table)).encode()).hexdigest()

    def _stock_tensors(self, name: str) -> dict[str, StockTensor]:
        source, experts = self.file.tensors[name], self.config.get("num_experts", 0)
        names = stock_names(name, min(experts, source.shape[0]))  # a damaged number of experts may be huge
        if not names:
            raise ConversionError(
                f"{source.path} contains the tensor {quoted(name)}, which the stock model does not have: convert the "
                "checkpoint that it was made from"
            )
        is_stacked = None not in names.values()
        if is_stacked and (len(source.shape) < 3 or source.shape[0] != experts):
            raise ConversionError(
                f"{source.path}: tensor {name!r} has shape={list(source.shape)}, which does not fit {experts} experts"
            )
        rows = self._head_rows(name, source)
        return {stock: StockTensor(source, expert, rows) for stock, expert in names.items()}

    def _head_rows(self, name: str, source: GgufTensor) -> int | None:
        key = head_count_key(name)
        if key is None or not read_architecture(self.file).interleaved:
            return None
        heads, size = self.config[key], self.config["head_dim"]
        if source.shape[0] != heads * size or size % 2:
            raise ConversionError(
                f"{source.path}: tensor {name!r} has shape={list(source.shape)}, which does not fit {heads} heads of "
                f"{size} features: download the file again"
            )
        return size


def require_gguf() -> None:
    """Raise `ConversionError` if the gguf package is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConversionError('GGUF files need the gguf package: pip install "crosshead[gguf]"') from error


def write_side_files(store: GgufStore, folder: Path) -> None:
    """Write the tokenizer and the generation config into `folder`."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST_TRANSFORMERS:
        raise ConversionError(
            f"transformers {transformers.__version__} reads tokenizers of GGUF files wrongly: use 5.18 or later"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _load_tokenizer(store, folder)
    if templates := further_templates(store.file.metadata):
        default = {"default": tokenizer.chat_template} if tokenizer.chat_template is not None else {}
        tokenizer.chat_template = default | templates
    tokenizer.save_pretrained(folder)
    if store.file.metadata["tokenizer.ggml.model"] == "gpt2":
        correct_tokens(folder / "tokenizer.json", store.file.metadata)
    ids = {name: value for name, value in store.config.items() if name.endswith("_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)


def _load_tokenizer(store: GgufStore, folder: Path) -> Any:
    path, metadata = store.file.paths[0], store.file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ConversionError(f"{path} has no tokenizer: convert the checkpoint that it was made from")
    # transformers reads a link in an empty folder, so that it finds no other files next to the GGUF file.
    link = folder / "gguf" / "model.gguf"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(path.absolute())
    # transformers reads these keys from 5.23 on. If they are missing, sentencepiece models add BOS.
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            link.parent, gguf_file=link.name, add_bos_token=add_bos, add_eos_token=add_eos, trust_remote_code=False
        )
    except Exception as error:  # the metadata may contain anything, and transformers raises many types of errors
        raise ConversionError(f"{path} has a tokenizer that transformers cannot read: {one_line(error)}") from error
    known = pre_tokeniser(str(metadata.get("tokenizer.ggml.pre"))) if kind == "gpt2" else None
    if known is not None:  # transformers reads smollm as gpt-2, for example
        tokenizer.backend_tokenizer.pre_tokenizer = known
    if kind == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True):  # transformers ignores the key
        tokenizer.backend_tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        tokenizer.backend_tokenizer.decoder = Sequence([Replace(SPACE, " "), ByteFallback(), Fuse()])
    return tokenizer
