"""The tensors that mechanisms add to a checkpoint: names, shapes, initial values, and the biases of expert routers."""

from typing import Any

import torch
from torch import nn

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS
from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, ParameterModule

from ..sources.tensor_store import TensorStore
from .families import Shapes, attention_prefix

ROUTER = "mlp.gate.weight"
SEED_STRIDE = 1_000_003
"""Difference between the seeds of two layers, so that runs with neighbouring seeds share no layer's seed."""


def bias_shapes(config: Any, shapes: Shapes) -> Shapes:
    """The names and shapes of expert router biases, given the stock tensors; they are float32 in any checkpoint."""
    if not getattr(config, "expert_bias", False):
        return {}
    routers = {name: shape for name, shape in shapes.items() if name.endswith(ROUTER)}
    return {name.removesuffix("weight") + EXPERT_BIAS: shape[:1] for name, shape in routers.items()}


def dropped_biases(store: TensorStore, config: Any, shapes: Shapes) -> dict[str, str]:
    """The router biases and why a stock checkpoint omits them; `ConversionError` for a bias that is not zero."""
    names = bias_shapes(config, shapes)
    for name in names:
        if store.read(name).any():
            raise ConversionError(
                f"{name} is not zero, so it cannot be folded into a stock layer: a stock router has no bias"
            )
    return dict.fromkeys(names, "zero, so it does not affect the choice of experts")


def mixers_layout(config: Any, layer: int) -> HeadLayout:
    """The head layout of one layer as its mechanisms see it."""
    return shared_layout(config.mixers_of_layer(layer), config.layout_of_layer(layer))


def layer_mixers(config: Any, layer: int) -> nn.ModuleDict:
    """The mechanisms of one layer as modules, with the names of the model."""
    settings, layout = config.mixers_of_layer(layer), mixers_layout(config, layer)
    return nn.ModuleDict({name: MECHANISMS[name](layout, options) for name, options in settings.items()})


def created_shapes(config: Any, layer: int) -> Shapes:
    """The names and shapes of the tensors that one layer's mechanisms add."""
    with torch.device("meta"):
        modules = layer_mixers(config, layer)
    prefix = f"{attention_prefix(layer)}mixers."
    return {prefix + name: tuple(tensor.shape) for name, tensor in modules.state_dict().items()}


def starting_values(config: Any, layer: int, seed: int) -> dict[str, torch.Tensor]:
    """The initial values of these tensors (float32), determined by the seed and the layer."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed * SEED_STRIDE + layer)
        modules = layer_mixers(config, layer)
        for module in modules.modules():
            if isinstance(module, ParameterModule):
                module.initialise(config.initializer_range)
    prefix = f"{attention_prefix(layer)}mixers."
    return {prefix + name: tensor.detach() for name, tensor in modules.state_dict().items()}


def mixed_shapes(config: Any, shapes: Shapes) -> Shapes:
    """The tensors of a crosshead checkpoint, given the stock tensors: new ones, and projections of component heads."""
    mixed = shapes | bias_shapes(config, shapes)
    for layer in range(config.num_hidden_layers):
        if not config.mixers_of_layer(layer):
            continue
        mixed |= created_shapes(config, layer)
        for projection, heads in zip(("k_proj", "v_proj"), component_heads(config, layer), strict=True):
            rows = heads * config.layout_of_layer(layer).head_dim
            for part in ("weight", "bias"):
                name = f"{attention_prefix(layer)}{projection}.{part}"
                if name in mixed:
                    mixed[name] = (rows, *mixed[name][1:])
    return mixed


def component_heads(config: Any, layer: int) -> tuple[int, int]:
    """The number of heads of one layer's key projection and of its value projection."""
    layout = mixers_layout(config, layer)
    return layout.key_components, layout.value_components


def cache_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of KV cache per token, with weights of this dtype."""
    numbers = 0
    for layer in range(config.num_hidden_layers):
        heads = sum(component_heads(config, layer))
        numbers += heads * config.layout_of_layer(layer).head_dim + _key_side_data(config, layer, dtype)
    return numbers * dtype.itemsize


def _key_side_data(config: Any, layer: int, dtype: torch.dtype) -> int:
    """How many further numbers one layer's mechanisms cache per token."""
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
