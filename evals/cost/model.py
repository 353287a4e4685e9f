"""What a model costs, from its config alone: parameters, multiplications and FLOPs per token, bytes of KV cache.

The model is made on the meta device, where tensors have shapes and no memory: sizes come from the modules that would
run. `cost_layer.py` measures attention; elsewhere each weight of a matrix multiplies once a token, and
of a mixture of experts only the chosen ones do. A multiplication and the addition after it are two FLOPs. Training is
a forward pass and a backward one, which costs twice as much: no activation checkpointing, no optimiser.
"""

from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from .attention import FLOPS, AttentionCost, attention_cost

PASSES = 3
"""What training costs, in forward passes."""
ATTENTION, NEW, EXPERTS = "self_attn.", "self_attn.mixers.", "mlp.experts."
"""How the names of a layer's parameters start."""


@dataclass(frozen=True)
class Cost:
    """What a model costs at one length; figures of work are per token.

    Training and prefill take a whole text of that length; training needs logits for each token, prefill for the last.
    Decoding makes the last token, with the others in the cache.
    """

    parameters: int
    active_parameters: int
    """Without the experts that a token does not visit."""
    attention_parameters: int
    new_parameters: int
    """Of the mechanisms; part of attention's."""
    training_multiplications: int
    prefill_multiplications: int
    decode_multiplications: int
    training_flops: int
    prefill_flops: int
    decode_flops: int
    kv_bytes_per_token: int
    kv_bytes: int
    """At the length."""


@dataclass(frozen=True)
class _Layer:
    attention: AttentionCost
    weights: int
    """Beside attention, those that multiply for one token."""
    window: int | None

    def cached_tokens(self, length: int) -> int:
        """Of a window, all but the place of the token to come."""
        return length if self.window is None else min(length, self.window - 1)


def model_cost(config: Any, length: int) -> Cost:
    """The cost of a Llama, Qwen2, Qwen3 or Qwen3-MoE model, stock or ours, for texts of `length` tokens."""
    if length < 1:
        raise ValueError(f"length={length} is not allowed: use a number of tokens from 1 up")
    model = on_meta(config)
    head, layers = model.lm_head.weight.numel(), _layers(model, length)
    forward = sum(layer.attention.forward // length + layer.weights for layer in layers)
    work = {
        "training": PASSES * (forward + head),
        "prefill": forward + round(Fraction(head, length)),
        "decode": sum(layer.attention.decode + layer.weights for layer in layers) + head,
    }
    stored = [(layer, layer.attention.cached_numbers * model.dtype.itemsize) for layer in layers]
    return Cost(
        **_parameters(model),
        **{f"{phase}_multiplications": count for phase, count in work.items()},
        **{f"{phase}_flops": FLOPS * count for phase, count in work.items()},
        kv_bytes_per_token=sum(size for _, size in stored),
        kv_bytes=sum(layer.cached_tokens(length) * size for layer, size in stored),
    )


def on_meta(config: Any) -> Any:
    """The language model of a config, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")


def _parameters(model: Any) -> dict[str, int]:
    total = model.num_parameters()
    held = [(name, parameter.numel()) for layer in model.model.layers for name, parameter in layer.named_parameters()]
    experts = sum(count for name, count in held if name.startswith(EXPERTS))
    return {
        "parameters": total,
        "active_parameters": total - experts + int(experts * _visited(model.config)),
        "attention_parameters": sum(count for name, count in held if name.startswith(ATTENTION)),
        "new_parameters": sum(count for name, count in held if name.startswith(NEW)),
    }


def _visited(config: Any) -> Fraction:
    """The part of the experts that one token visits."""
    return Fraction(getattr(config, "num_experts_per_tok", 1), getattr(config, "num_experts", 1))


def _layers(model: Any, length: int) -> list[_Layer]:
    visited = _visited(model.config)
    layers = []
    # The library's own cache knows which layers have a window.
    for layer, cached in zip(model.model.layers, DynamicCache(config=model.config).layers, strict=True):
        weights = sum(
            parameter.numel() * (visited if name.startswith(EXPERTS) else 1)
            for name, parameter in layer.named_parameters()
            if parameter.ndim > 1 and not name.startswith(ATTENTION)
        )
        attention = attention_cost(layer.self_attn, model.config, length)
        layers.append(_Layer(attention, int(weights), getattr(cached, "sliding_window", None)))
    return layers
