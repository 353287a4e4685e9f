"""Tensors that mechanisms add to a checkpoint: initial values, component heads, KV cache size, and router biases."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS
from crosshead.modeling.backbones.t5 import ENCODER
from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, ParameterModule

from ..sources.tensor_store import TensorStore
from .attention_names import attention_layers, parts_of
from .families import family_of

SEED_STRIDE = 1_000_003
"""A layer's seed is `seed * SEED_STRIDE + layer`, so that runs with neighbouring seeds share no layer's seed."""


def dropped_biases(store: TensorStore, added: Iterable[str]) -> dict[str, str]:
    """Return the router biases that a stock checkpoint lacks -> reason; `ConversionError` if one is not zero."""
    names = [name for name in added if name.endswith(EXPERT_BIAS)]
    for name in names:
        if store.read(name).any():
            raise ConversionError(
                f"{name} is not zero, so it cannot be folded into a stock layer: a stock router has no bias"
            )
    return dict.fromkeys(names, "zero, so it does not affect the choice of experts")


def mixers_layout(config: Any, layer: int) -> HeadLayout:
    """Return the head layout of one layer as its mechanisms see it."""
    return shared_layout(config.mixers_of_layer(layer), config.layout_of_layer(layer))


def layer_mixers(config: Any, layer: int) -> nn.ModuleDict:
    """Return the mechanisms of one layer as modules, named as in the model."""
    settings, layout = config.mixers_of_layer(layer), mixers_layout(config, layer)
    return nn.ModuleDict({name: MECHANISMS[name](layout, options) for name, options in settings.items()})


def starting_values(config: Any, layer: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the initial values (float32), by part, of the tensors that one layer's mechanisms add, for a seed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed * SEED_STRIDE + layer)
        modules = layer_mixers(config, layer)
        for module in modules.modules():
            if isinstance(module, ParameterModule):
                module.initialise(_initial_std(config))
    return {f"mixers.{name}": tensor.detach() for name, tensor in modules.state_dict().items()}


def _initial_std(config: Any) -> float:
    """Return the standard deviation of random initial values; a T5 derives it from `d_model`."""
    if hasattr(config, "initializer_factor"):
        return float(config.initializer_factor * config.d_model**-0.5)
    return config.initializer_range


def cache_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of KV cache per token, for weights of this dtype.

    For a T5: one output token in self-attention, plus one input token in cross-attention.
    """
    numbers, uncached = 0, parts_of(config).get(ENCODER, ())
    for layer in filter(lambda layer: layer not in uncached, attention_layers(config)):
        layout = mixers_layout(config, layer)
        separate = layout.key_components * layout.head_dim + layout.value_components * layout.value_dim
        latent = config.kv_lora_rank + config.qk_rope_head_dim if family_of(config).latent else 0
        numbers += latent or separate
        numbers += _key_side_data(config, layer, dtype)
    return numbers * dtype.itemsize


def _key_side_data(config: Any, layer: int, dtype: torch.dtype) -> int:
    """Return how many numbers per token one layer's mechanisms cache besides keys and values."""
    layout = mixers_layout(config, layer)
    with torch.device("meta"):
        modules: Any = layer_mixers(config, layer).to(dtype)
        hidden = torch.empty(1, 1, layout.hidden_size, dtype=dtype)
        query = torch.empty(1, layout.query_heads, 1, layout.head_dim, dtype=dtype)
        key = torch.empty(1, layout.key_components, 1, layout.head_dim, dtype=dtype)
        value = torch.empty(1, layout.value_components, 1, layout.value_dim, dtype=dtype)
        state = AttentionState(hidden, hidden, query, key, value)
        for mixer in modules.values():
            mixer.before_rope(state)
    return sum(numbers.shape[-1] for numbers in state.key_side_data.values())
