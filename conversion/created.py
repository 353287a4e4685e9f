"""The tensors that a mechanism adds to a layer: their names, shapes and starting values, from the mechanism itself."""

from typing import Any

import torch
from torch import nn

from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, ParameterModule

from .expert_bias import bias_shapes
from .families import Shapes, layer_prefix

SEED_STRIDE = 1_000_003
"""Between the seeds of two layers, so that runs with neighbouring seeds share no layer's."""


def layer_mixers(config: Any, layer: int) -> nn.ModuleDict:
    """The mechanisms of one layer as modules, named as in the model."""
    settings = config.mixers_of_layer(layer)
    layout = shared_layout(settings, config.layout_of_layer(layer))
    return nn.ModuleDict({name: MECHANISMS[name](layout, options) for name, options in settings.items()})


def created_shapes(config: Any, layer: int) -> Shapes:
    """The names and shapes of the tensors that one layer's mechanisms add."""
    with torch.device("meta"):
        modules = layer_mixers(config, layer)
    prefix = f"{layer_prefix(layer)}self_attn.mixers."
    return {prefix + name: tuple(tensor.shape) for name, tensor in modules.state_dict().items()}


def starting_values(config: Any, layer: int, seed: int) -> dict[str, torch.Tensor]:
    """The tensors themselves (float32), the same for the same seed wherever the layer is made."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed * SEED_STRIDE + layer)
        modules = layer_mixers(config, layer)
        for module in modules.modules():
            if isinstance(module, ParameterModule):
                module.initialise(config.initializer_range)
    prefix = f"{layer_prefix(layer)}self_attn.mixers."
    return {prefix + name: tensor.detach() for name, tensor in modules.state_dict().items()}


def mixed_shapes(config: Any, shapes: Shapes) -> Shapes:
    """The tensors of a crosshead checkpoint, given those of the stock one: more of some, fewer component heads."""
    mixed = shapes | bias_shapes(config, shapes)
    for layer in range(config.num_hidden_layers):
        if not config.mixers_of_layer(layer):
            continue
        mixed |= created_shapes(config, layer)
        for side, heads in component_heads(config, layer).items():
            rows = heads * config.layout_of_layer(layer).head_dim
            for part in ("weight", "bias"):
                name = f"{layer_prefix(layer)}self_attn.{side[0]}_proj.{part}"
                if name in mixed:
                    mixed[name] = (rows, *mixed[name][1:])
    return mixed


def layer_components(config: Any, layer: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """What one layer caches for a token: the heads of its key and value projections, and the numbers beside them."""
    layout, heads = (
        shared_layout(config.mixers_of_layer(layer), config.layout_of_layer(layer)),
        component_heads(config, layer),
    )
    with torch.device("meta"):
        modules: Any = layer_mixers(config, layer).to(dtype)
        hidden = torch.empty(1, 1, layout.hidden_size, dtype=dtype)
        query = torch.empty(1, layout.query_heads, 1, layout.head_dim, dtype=dtype)
        key = torch.empty(1, heads["key"], 1, layout.head_dim, dtype=dtype)
        value = torch.empty(1, heads["value"], 1, layout.value_dim, dtype=dtype)
        state = AttentionState(hidden, hidden, query, key, value)
        for mixer in modules.values():
            mixer.before_rope(state)
    return heads, sum(numbers.shape[-1] for numbers in state.key_side_data.values())


def component_heads(config: Any, layer: int) -> dict[str, int]:
    """How many heads the key and value projections of one layer have."""
    layout = shared_layout(config.mixers_of_layer(layer), config.layout_of_layer(layer))
    return {"key": layout.key_components, "value": layout.value_components}
