"""The layers of a crosshead checkpoint as stock layers."""

from typing import Any

import torch

from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import RULES

from .created import starting_values
from .errors import ConversionError
from .families import Shapes, layer_prefix
from .fold_rules import FOLD_RULES, PROJECTIONS
from .layer_rewrites import ATTENTION, LayerRewrites, Tensors, full_names, read_attention
from .store import TensorStore


def fold_layers(store: TensorStore, config: Any, shapes: Shapes) -> LayerRewrites:
    """The rewrites that fold every layer; `ConversionError` where one cannot, before anything is written."""
    applied = {layer: _mechanisms_to_apply(store, config, layer) for layer in range(config.num_hidden_layers)}
    names: dict[str, int] = {}
    for layer, mechanisms in applied.items():
        sides = {side for name in mechanisms for side in config.mixers_of_layer(layer)[name].get("on", ())}
        prefix = layer_prefix(layer) + ATTENTION
        folded = [f"{prefix}{PROJECTIONS[side]}.{part}" for side in sorted(sides) for part in ("weight", "bias")]
        names |= {name: layer for name in folded if name in shapes}

    def make(layer: int) -> Tensors:
        tensors = read_attention(store, layer)
        for name in applied[layer]:
            tensors = FOLD_RULES[name].apply(tensors, config.layout_of_layer(layer))
        return full_names(layer, tensors)

    return LayerRewrites(names, make)


def _mechanisms_to_apply(store: TensorStore, config: Any, layer: int) -> list[str]:
    """The mechanisms of a layer that must be worked in; those that are as they started, neutral, need not be."""
    settings = config.mixers_of_layer(layer)
    layout = shared_layout(settings, config.layout_of_layer(layer))
    applied = []
    for name, options in settings.items():
        if RULES[name].starts_neutral(options, layout) and _is_as_started(store, config, layer, name):
            continue
        reason = FOLD_RULES[name].refusal(options, layout) if name in FOLD_RULES else "no rule says how"
        if reason:
            raise ConversionError(f"{name!r} in layer {layer} cannot be folded into a stock layer: {reason}")
        applied.append(name)
    return applied


def _is_as_started(store: TensorStore, config: Any, layer: int, mechanism: str) -> bool:
    prefix = f"{layer_prefix(layer)}{ATTENTION}mixers.{mechanism}."
    started = {name: value for name, value in starting_values(config, layer, 0).items() if name.startswith(prefix)}
    return all(torch.equal(store.read(name), value.to(store.read(name).dtype)) for name, value in started.items())
