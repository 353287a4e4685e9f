"""The tensors that mechanisms add to a checkpoint: names, shapes, starting values, and biases of expert routers."""

from typing import Any

import torch
from torch import nn

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS
from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, ParameterModule

from ..sources.tensor_store import TensorStore
from .families import Shapes, layer_prefix

ROUTER = "mlp.gate.weight"


def bias_shapes(config: Any, shapes: Shapes) -> Shapes:
    """The names and shapes of the biases, given the stock tensors; float32 whatever the dtype of those."""
    if not getattr(config, "expert_bias", False):
        return {}
    routers = {name: shape for name, shape in shapes.items() if name.endswith(ROUTER)}
    return {name.removesuffix("weight") + EXPERT_BIAS: shape[:1] for name, shape in routers.items()}


def dropped_biases(store: TensorStore, config: Any, shapes: Shapes) -> dict[str, str]:
    """The biases with why a stock checkpoint does without; `ConversionError` where one chooses other experts."""
    names = bias_shapes(config, shapes)
    for name in names:
        bias = store.read(name)
        if not torch.equal(bias, torch.zeros_like(bias)):
            raise ConversionError(
                f"{name} is not zero, so it cannot be folded into a stock layer: a stock router chooses its experts "
                "without a bias"
            )
    return dict.fromkeys(names, "zero, so it chooses no other experts")


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
