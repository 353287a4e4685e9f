"""Builds the stock config.json of the model in a GGUF file.

Every size is read from the file. transformers' own reader uses the defaults of the config classes for some sizes (the
head size of Qwen3, the width of its experts, biases) and ignores RoPE scaling, which silently gives a wrong model. A
metadata key that the tables of this file do not list is an error, because it may change the model's outputs.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError

from ..sources.tensor_store import DTYPES
from .header import GgufFile
from .tensors import ARCHITECTURES, DEQUANTISED_DTYPE, EMBEDDING, HEAD, Architecture

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Metadata key without the architecture's prefix -> field of config.json."""
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata key of a mixture of experts, without the architecture's prefix -> field of config.json."""
TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
"""Metadata key of a special token's id -> field of config.json."""
_OTHER_KEYS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
}
"""Further metadata keys that `stock_config` reads, without the architecture's prefix."""
_IGNORED_KEYS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", *EXPERT_SIZES}
"""Further allowed keys: sizes of experts, and keys that repeat tensor shapes or do not change the outputs."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE parameters of all Llama 3.1, 3.2 and 3.3 models, which differ only in `factor`."""


def read_architecture(file: GgufFile) -> Architecture:
    """Return the stock model family of a GGUF file; `ConversionError` for an unknown architecture."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConversionError(
            f"{file.paths[0]} has general.architecture={quoted(name)}, which cannot be converted: use one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def stock_config(file: GgufFile, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """Return the content of config.json; `rope_factors` are the file's divisors of RoPE frequencies, if any."""
    architecture = read_architecture(file)
    metadata = _ModelMetadata(file)
    for required in (EMBEDDING, "output_norm.weight"):
        if required not in file.tensors:
            raise ConversionError(f"{file.paths[0]} has no tensor {required!r}: give a GGUF file of a complete model")
    sizes = SIZES | (EXPERT_SIZES if architecture.experts else {})
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.stock_class]}
    config |= {field: metadata.integer(key) for key, field in sizes.items()}
    config["num_key_value_heads"] = metadata.integer("attention.head_count_kv", config["num_attention_heads"])
    config["head_dim"] = _head_size(metadata, config)
    config["vocab_size"] = file.tensors[EMBEDDING].shape[0]
    config["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    config["rope_parameters"] = _rope(metadata, config["head_dim"], rope_factors)
    config["tie_word_embeddings"] = HEAD not in file.tensors
    for key, field in TOKENS.items():
        config[field] = file.metadata.get(key)
        if isinstance(config[field], list):
            raise ConversionError(
                f"{file.paths[0]} has {key}={quoted(config[field])}, but it must be one id: download the file again"
            )
    inferred = {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "norm_topk_prob": True,  # as llama.cpp computes it; the default of the config class is False
    }
    config |= {field: inferred[field] for field in architecture.inferred_fields}
    config["dtype"] = _dtype(file)
    return config


class _ModelMetadata:
    """Metadata of the model, by keys without the architecture's prefix; the tables of this file must list all keys."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.paths[0]
        self._prefix = f"{file.metadata['general.architecture']}."
        own = [key for key in file.metadata if key.startswith(self._prefix)]
        self.values = {key.removeprefix(self._prefix): file.metadata[key] for key in own}
        for key in sorted(self.values.keys() - SIZES.keys() - _OTHER_KEYS - _IGNORED_KEYS):
            raise self.error(key, "which the stock model does not know: convert the checkpoint it was made from")

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a positive number, or `default` if the key is missing."""
        value: Any = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, "but it must be a positive number: download the file again")
        if type(value) is float and np.float32(value) == value:  # 9.999999747378752e-06 is the float32 of 1e-5
            return float(str(np.float32(value)))
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer, or `default` if the key is missing."""
        value = self.number(key, default)
        if type(value) is not int:
            raise self.error(key, "but it must be an integer: download the file again")
        return value

    def error(self, key: str, problem: str) -> ConversionError:
        """Return the error that names a key, its value and the problem."""
        return ConversionError(f"{self.path} has {self._prefix}{key}={quoted(self.values.get(key))}, {problem}")


def _head_size(metadata: _ModelMetadata, config: dict[str, Any]) -> int:
    size = metadata.integer("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, size) != size:
            raise metadata.error(key, f"but heads have {size} features: the stock model does not support this")
    return size


def _rope(metadata: _ModelMetadata, head_size: int, factors: Sequence[float] | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10000.0), "rope_type": "default"}
    usual_kind = "none" if metadata.values.get("rope.scaling.factor", 0) == 0 else "linear"
    kind = metadata.values.get("rope.scaling.type", usual_kind)
    if kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    elif kind != "none":
        raise metadata.error("rope.scaling.type", "which cannot be converted: use one of none, linear, yarn")
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    if factors is not None and any(factor != 1 for factor in factors):
        if kind != "none" or len(factors) != head_size // 2 or not all(0 < factor < math.inf for factor in factors):
            raise ConversionError(
                f"{metadata.path} has {len(factors)} RoPE factors and rope.scaling.type={kind!r}, which the stock "
                "model does not support: convert the checkpoint that it was made from"
            )
        parameters |= _factor_parameters(parameters["rope_theta"], factors, head_size) or {
            "rope_type": "longrope",
            "short_factor": list(factors),
            "long_factor": list(factors),
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.integer("context_length"),
        }
    return parameters


def _factor_parameters(theta: float, factors: Sequence[float], head_size: int) -> dict[str, Any] | None:
    """Return RoPE parameters of the type llama3 that have these factors; None if no such parameters exist."""
    factor = round(max(factors), 4)
    if factor < 1:
        return None
    parameters = {"rope_theta": theta, "rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
    pairs = zip(factors, llama3_factors(parameters, head_size), strict=True)
    return parameters if all(math.isclose(*pair, rel_tol=1e-4) for pair in pairs) else None


def llama3_factors(parameters: Mapping[str, Any], head_size: int) -> list[float]:
    """Return the divisors of the RoPE frequencies in llama.cpp (head_size / 2) for parameters of the type llama3."""
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    factors = []
    for feature in range(0, head_size, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (feature / head_size)
        rotations = parameters["original_max_position_embeddings"] / wavelength
        smooth = min(max((rotations - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _dtype(file: GgufFile) -> str:
    """Return the dtype of all matrices if they have the same unquantised one, else the dtype after dequantising."""
    formats = {tensor.format.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = DTYPES.get(formats.pop(), DEQUANTISED_DTYPE) if len(formats) == 1 else DEQUANTISED_DTYPE
    return str(dtype).removeprefix("torch.")
