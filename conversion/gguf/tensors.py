"""Tensors of a GGUF file: their stock names, and reading them in stock row order, one block of rows at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import CHUNK, fill, open_regular_file

from ..sources.tensor_store import DTYPE_NAMES, DTYPES, Entry
from .header import GgufTensor


@dataclass(frozen=True)
class Architecture:
    """The stock model family of a GGUF architecture, and how its tensors differ from the stock tensors."""

    model_type: str
    stock_class: str
    inferred_fields: tuple[str, ...] = ()
    """Config fields that the metadata does not contain: `stock_config` infers them."""
    interleaved: bool = False
    """True if RoPE rotates adjacent rows of a head together; in stock heads, these are half a head apart."""
    experts: bool = False
    rope_factors: bool = False
    """True if llama.cpp reads a tensor of RoPE frequency divisors for this architecture."""


ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", ("attention_bias", "mlp_bias"), interleaved=True, rope_factors=True
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", ("attention_bias",)),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", ("attention_bias", "norm_topk_prob"), experts=True),
}
"""GGUF architecture (`general.architecture`) -> its stock model family."""
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
DEQUANTISED_DTYPE = torch.float32
"""Dtype of the tensors that the `gguf` package dequantises."""

_OUTER = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_STOCK_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.\d+\.)?([\w.]+)\.(weight|bias)")
_OUTER_NAMES = {stock: name for name, stock in _OUTER.items()}
_LAYER_NAMES = {stock: name for name, stock in (_INNER | _STACKED).items()}


def stock_names(name: str, experts: int) -> dict[str, int | None]:
    """Return the names of the stock tensors in a GGUF tensor -> the index of their expert, None outside of experts.

    A stack of experts contains one stock tensor per expert. The result is empty for an unknown name.
    """
    if name in _OUTER:
        return {_OUTER[name]: None}
    match = _LAYER.fullmatch(name)
    if match is None:
        return {}
    layer, part, kind = match.groups()
    if part in _INNER:
        return {f"model.layers.{layer}.{_INNER[part]}.{kind}": None}
    if part in _STACKED:
        return {f"model.layers.{layer}.mlp.experts.{i}.{_STACKED[part]}.{kind}": i for i in range(experts)}
    return {}


def gguf_name(stock: str) -> str:
    """Return the name of the GGUF tensor that contains a stock tensor; the inverse of `stock_names`."""
    match = _STOCK_LAYER.fullmatch(stock)
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}" if match else _OUTER_NAMES[stock]


def head_count_key(name: str) -> str | None:
    """Return the config field with the number of heads of a query or key projection; None for other tensors."""
    match = _LAYER.fullmatch(name)
    return {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(match[2]) if match else None


def depth(name: str) -> tuple[int, int]:
    """Return a sort key for the order of the model: embedding, layers, final norm and LM head."""
    if match := _LAYER.fullmatch(name):
        return 1, int(match[1])
    return (0, 0) if name == EMBEDDING else (2, 0)


@dataclass(frozen=True)
class StockTensor:
    """One stock tensor inside a GGUF file: a whole tensor of the file, or one expert of a stack."""

    source: GgufTensor
    expert: int | None = None
    head_rows: int | None = None
    """Number of rows per head, if the file interleaves the rows of a head; None otherwise."""

    def entry(self, name: str) -> Entry:
        """Return the entry of this tensor in a `TensorStore`."""
        dtype = DTYPES.get(self.source.format.name, DEQUANTISED_DTYPE)
        return Entry(name, DTYPE_NAMES[dtype], self.source.shape[self.expert is not None :])

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield dequantised blocks of rows of about a megabyte; complete heads if rows are interleaved."""
        entry = self.entry("")
        rows, row_size = entry.shape[0], entry.size // entry.shape[0]
        packed = self.source.size // prod(self.source.shape[: len(self.source.shape) - len(entry.shape) + 1])
        unit = self.head_rows or 1
        step = max(1, CHUNK // (row_size * unit)) * unit
        start = self.source.start + (self.expert or 0) * rows * packed
        with open_regular_file(self.source.path) as (descriptor, _):
            for row in range(0, rows, step):
                count = min(step, rows - row)
                raw = torch.empty(count, packed, dtype=torch.uint8)
                fill(raw.numpy().data.cast("B"), descriptor, self.source.path, start + row * packed)
                block = dequantise(raw, self.source.format)
                block = block if self.head_rows is None else _swapped(block, self.head_rows // 2, 2)
                yield block.view(count, *entry.shape[1:])


def interleaved(rows: torch.Tensor, head_rows: int) -> torch.Tensor:
    """Reorder the rows (rows, columns) of complete stock heads: rows that RoPE rotates together become adjacent."""
    return _swapped(rows, 2, head_rows // 2)


def _swapped(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Reorder rows (heads * outer * inner, columns) to (heads * inner * outer, columns)."""
    return rows.view(-1, outer, inner, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def dequantise(raw: torch.Tensor, quantisation: Any) -> torch.Tensor:
    """Convert raw rows (rows, bytes) to values (rows, columns)."""
    if quantisation.name in DTYPES:
        return raw.view(DTYPES[quantisation.name])
    from gguf import dequantize

    return torch.from_numpy(dequantize(raw.numpy(), quantisation))


def check_format(name: str, tensor: GgufTensor) -> None:
    """Refuse a tensor whose format cannot be dequantised, before anything is written."""
    if tensor.format.name in DTYPES:
        return
    from gguf import GGML_QUANT_SIZES

    try:
        if len(tensor.shape) < 2:
            raise NotImplementedError
        dequantise(torch.zeros(1, GGML_QUANT_SIZES[tensor.format][1], dtype=torch.uint8), tensor.format)
    except NotImplementedError as error:
        raise ConversionError(
            f"{tensor.path}: tensor {name!r} of {len(tensor.shape)} dimensions is stored as {tensor.format.name}, "
            "which the gguf package cannot dequantise: give a GGUF file in another format, such as Q8_0 or F16"
        ) from error
