"""Toy GGUF files of stock models, laid out like llama.cpp's converter does, with names from the `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import toys

ARCHITECTURES = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen3Moe": "qwen3moe"}
"""GGUF architecture name, by backbone."""
SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "moe_intermediate_size": 64}
"""Sizes that are multiples of the quantisation blocks."""
TOKENS = ["<|endoftext|>", "a", "b", "c", "Ġ", "ab", *(chr(code) for code in range(ord("d"), ord("z") + 1))]
TOKENS += [f"<|{index}|>" for index in range(toys.SIZES["vocab_size"] - len(TOKENS))]
CONTROL, NORMAL = 3, 1
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [CONTROL if token.startswith("<|") else NORMAL for token in TOKENS],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def model(backbone: str, **changes: Any) -> Any:
    """Return a tiny stock model whose matrices can be quantised."""
    sizes = SIZES | ({"head_dim": 32} if backbone.startswith("Qwen3") else {}) | changes
    if backbone != "Qwen3Moe":
        del sizes["moe_intermediate_size"]
    return toys.stock_model(backbone, **sizes)


def stock_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by stock checkpoint names: one tensor per expert, no lm_head if it is tied."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(half.chunk(2) for half in tensor):
                tensors[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                tensors[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = tensor
    return tensors


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Return the weights by GGUF names: experts stacked, Llama's q and k rows permuted into RoPE pairs."""
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in stock_tensors(model).items():
        values = tensor.float().numpy()
        if ".experts." in name:
            before, after = name.split(".experts.")
            expert, part, kind = after.split(".")
            stack = f"{names.get_name(f'{before}.experts.{part}')}.{kind}"
            tensors[stack] = np.concatenate([*([tensors[stack]] if expert != "0" else []), values[None]])
            continue
        stem, kind = name.rsplit(".", 1)
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        tensors[f"{names.get_name(stem)}.{kind}"] = np.ascontiguousarray(values)
    return tensors


def metadata(model: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a model."""
    config = model.config
    facts = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if architecture == "llama":
        facts |= {"rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size}
    if architecture == "qwen3moe":
        facts |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        facts |= {"expert_feed_forward_length": config.moe_intermediate_size}
    return TOKENIZER | {f"{architecture}.{key}": value for key, value in facts.items()}


def quantised(values: np.ndarray, form: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return values in a GGUF format; random blocks for Q6_K, which the `gguf` package cannot quantise."""
    if form == gguf.GGMLQuantizationType.Q6_K:
        block, size = gguf.GGML_QUANT_SIZES[form]
        blocks = np.random.default_rng(0).integers(0, 256, (values.size // block, size), dtype=np.uint8)
        blocks[:, -2:] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)
    return gguf.quantize(values, form)


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    facts: dict[str, Any],
    architecture: str,
    formats: dict[str, str] | None = None,
) -> Path:
    """Write one GGUF file. `formats` maps name suffixes to the format of matrices; the last match counts."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in facts.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)
    for name, values in tensors.items():
        fitting = [form for end, form in (formats or {}).items() if name.endswith(end) and values.ndim > 1]
        form = gguf.GGMLQuantizationType[fitting[-1] if fitting else "F32"]
        writer.add_tensor(name, quantised(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, model: Any, backbone: str, formats: dict[str, str] | None = None, **facts: Any) -> Path:
    """Write a model as a GGUF file; `facts` override its metadata."""
    architecture = ARCHITECTURES[backbone]
    fields = metadata(model, architecture) | facts
    return write(path, gguf_tensors(model, architecture), fields, architecture, formats)
