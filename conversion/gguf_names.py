"""GGUF's architectures and tensor names, and what stock checkpoints call the same things."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """What becomes of a GGUF architecture."""

    model_type: str
    stock_class: str
    interleaved: bool = False
    """Whether the rows of each query and key head come in rotated pairs, and not half after half as in stock ones."""
    experts: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", experts=True),
}
"""The value of `general.architecture` -> its stock family."""
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

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


def stock_names(name: str, experts: int) -> dict[str, int | None]:
    """The stock tensors that one of GGUF's holds: one per expert where it is a stack of them, none if it is unknown.

    The values say which of the stack, None where there is none.
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


def head_count_key(name: str) -> str | None:
    """Which count tells the heads that this tensor's rows belong to, for queries and keys; None for others."""
    match = _LAYER.fullmatch(name)
    return {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(match[2]) if match else None


def depth(name: str) -> tuple[int, int]:
    """Sorts by the order in which a model uses the tensors: the embedding, layer by layer, the norm and the head."""
    if match := _LAYER.fullmatch(name):
        return 1, int(match[1])
    return (0, 0) if name == EMBEDDING else (2, 0)
