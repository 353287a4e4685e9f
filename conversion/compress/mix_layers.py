"""Computes the layers of a crosshead model from those of a stock checkpoint."""

from dataclasses import dataclass
from typing import Any

from ..architectures.families import Shapes, layer_prefix
from ..architectures.mixer_tensors import component_heads, created_shapes, starting_values
from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..options import MixerRequest
from ..sources.tensor_store import TensorStore
from .layer_rewrites import ATTENTION, LayerRewrites, Tensors, full_names, read_attention
from .reorder_heads import most_used_first, reorder
from .virtual_heads import rewrite, rewritten_names


@dataclass(frozen=True)
class LayerNeeds:
    """What one layer's conversion does beyond creating tensors."""

    key_heads: int
    value_heads: int
    combines: bool
    """It has fewer components than heads on a side."""
    reorders: bool


def layer_needs(config: Any, request: MixerRequest, layer: int) -> LayerNeeds:
    """From the target's config and the request."""
    settings = config.mixers_of_layer(layer)
    components = component_heads(config, layer)
    shared = settings.get("mixture", {}).get("shared_heads", 0)
    return LayerNeeds(
        key_heads=components["key"],
        value_heads=components["value"],
        combines=min(components.values()) < config.num_key_value_heads,
        reorders=shared > 0 and request.choices.get("mixture", {}).get("shared") == "calibrated",
    )


def mix_layers(
    store: TensorStore, config: Any, shapes: Shapes, request: MixerRequest, calibration: Calibration | None, seed: int
) -> LayerRewrites:
    """The rewrites that give every layer its mechanisms; `config` and `shapes` are the target's."""
    names: dict[str, int] = {}
    for layer in range(config.num_hidden_layers):
        names |= dict.fromkeys(_changed(config, shapes, request, layer), layer)

    def make(layer: int) -> Tensors:
        observed = calibration.observed(layer) if calibration is not None else {}
        new = full_names(layer, _rewritten(store, config, request, observed, layer))
        return {name: tensor for name, tensor in (starting_values(config, layer, seed) | new).items() if name in names}

    return LayerRewrites(names, make)


def _changed(config: Any, shapes: Shapes, request: MixerRequest, layer: int) -> set[str]:
    if not config.mixers_of_layer(layer):
        return set()
    needs, prefix = layer_needs(config, request, layer), layer_prefix(layer) + ATTENTION
    changed = set(created_shapes(config, layer))
    if needs.combines:
        method = request.choices["explicit"]["method"]
        parts = rewritten_names(config.layout_of_layer(layer), needs.key_heads, needs.value_heads, method)
        changed |= {prefix + part for part in parts}
    if needs.reorders:
        moved = [f"{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")]
        changed |= {prefix + name for name in (*moved, "o_proj.weight")}
    return changed & shapes.keys()


def _rewritten(
    store: TensorStore, config: Any, request: MixerRequest, observed: dict[str, Tensors], layer: int
) -> Tensors:
    needs, layout = layer_needs(config, request, layer), config.layout_of_layer(layer)
    if not (needs.combines or needs.reorders):
        return {}
    tensors = read_attention(store, layer)
    if needs.combines:
        statistics = HeadStatistics.from_tensors(observed["statistics"], layout) if "statistics" in observed else None
        method = request.choices["explicit"]["method"]
        tensors = rewrite(tensors, statistics, layout, needs.key_heads, needs.value_heads, method)
    if needs.reorders:
        shared = config.mixers_of_layer(layer)["mixture"]["shared_heads"]
        order = most_used_first(observed["use"]["counts"], layout.key_value_heads, shared)
        tensors = reorder(tensors, order, layout)
    return tensors


def needed_observations(config: Any, request: MixerRequest, chooses: bool) -> set[str]:
    """What must be observed: "statistics", "use", both or neither; `chooses` where counts are still to be chosen."""
    needs = [layer_needs(config, request, layer) for layer in range(config.num_hidden_layers)]
    aligned = request.choices.get("explicit", {}).get("method") == "aligned"
    wanted = {"statistics"} if aligned and (chooses or any(need.combines for need in needs)) else set()
    return wanted | ({"use"} if any(need.reorders for need in needs) else set())


def active_heads(config: Any) -> list[int]:
    """How many heads each layer's mixture keeps on; all where there is none."""
    layers = [config.mixers_of_layer(layer) for layer in range(config.num_hidden_layers)]
    return [layer.get("mixture", {}).get("active_heads", config.num_attention_heads) for layer in layers]


def component_pairs(config: Any) -> list[tuple[int, int]]:
    """Component heads of each layer's keys and values."""
    layers = [component_heads(config, layer) for layer in range(config.num_hidden_layers)]
    return [(heads["key"], heads["value"]) for heads in layers]
