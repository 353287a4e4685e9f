"""Computes the attention tensors of a crosshead model from those of a stock checkpoint."""

from dataclasses import dataclass
from typing import Any

from ..architectures.families import Shapes, attention_prefix
from ..architectures.mixer_tensors import component_heads, created_shapes, starting_values
from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..options import MixerRequest
from ..sources.tensor_store import TensorStore
from .layer_rewrites import LayerRewrites, Tensors, read_attention
from .reorder_heads import most_used_first, reorder
from .virtual_heads import Counts, rewrite, rewritten_names


@dataclass(frozen=True)
class LayerChanges:
    """How the conversion changes one layer, besides creating tensors."""

    components: Counts
    combines: bool
    """Whether keys or values have fewer components than heads."""
    reorders: bool
    """Whether the most used heads come first."""


def layer_changes(config: Any, request: MixerRequest, layer: int) -> LayerChanges:
    """The changes that the target's config and the request require."""
    components = component_heads(config, layer)
    shared = config.mixers_of_layer(layer).get("mixture", {}).get("shared_heads", 0)
    return LayerChanges(
        components=components,
        combines=min(components) < config.num_key_value_heads,
        reorders=shared > 0 and request.choices.get("mixture", {}).get("shared") == "calibrated",
    )


def convert_layers(
    store: TensorStore, config: Any, shapes: Shapes, request: MixerRequest, calibration: Calibration | None, seed: int
) -> LayerRewrites:
    """The rewrites that add the mechanisms to every layer; `config` and `shapes` are the target's."""
    layers: dict[str, int] = {}
    for layer in range(config.num_hidden_layers):
        layers |= dict.fromkeys(_changed_names(config, shapes, request, layer), layer)

    def compute(layer: int) -> Tensors:
        statistics = calibration.layer(layer) if calibration is not None else {}
        prefix = attention_prefix(layer)
        created = {name.removeprefix(prefix): tensor for name, tensor in starting_values(config, layer, seed).items()}
        return created | _rewritten(store, config, request, statistics, layer)

    return LayerRewrites(layers, compute)


def _changed_names(config: Any, shapes: Shapes, request: MixerRequest, layer: int) -> set[str]:
    if not config.mixers_of_layer(layer):
        return set()
    changes, prefix = layer_changes(config, request, layer), attention_prefix(layer)
    changed = set(created_shapes(config, layer))
    if changes.combines:
        method = request.choices["explicit"]["method"]
        parts = rewritten_names(config.layout_of_layer(layer), changes.components, method)
        changed |= {prefix + part for part in parts}
    if changes.reorders:
        moved = [f"{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")]
        changed |= {prefix + name for name in (*moved, "o_proj.weight")}
    return changed & shapes.keys()


def _rewritten(
    store: TensorStore, config: Any, request: MixerRequest, statistics: dict[str, Tensors], layer: int
) -> Tensors:
    changes, layout = layer_changes(config, request, layer), config.layout_of_layer(layer)
    if not (changes.combines or changes.reorders):
        return {}
    tensors = read_attention(store, layer)
    if changes.combines:
        sums = statistics.get("statistics")
        heads = None if sums is None else HeadStatistics.from_tensors(sums, layout)
        method = request.choices["explicit"]["method"]
        tensors = rewrite(tensors, heads, layout, changes.components, method)
    if changes.reorders:
        shared = config.mixers_of_layer(layer)["mixture"]["shared_heads"]
        order = most_used_first(statistics["use"]["counts"], layout.key_value_heads, shared)
        tensors = reorder(tensors, order, layout)
    return tensors


def needed_observations(config: Any, request: MixerRequest, chooses: bool) -> set[str]:
    """The kinds of statistics to record: "statistics", "use", both or none.

    `chooses` is true if `--layers auto` is still to choose the component heads.
    """
    changes = [layer_changes(config, request, layer) for layer in range(config.num_hidden_layers)]
    is_aligned = request.choices.get("explicit", {}).get("method") == "aligned"
    needed = {"statistics"} if is_aligned and (chooses or any(each.combines for each in changes)) else set()
    return needed | ({"use"} if any(each.reorders for each in changes) else set())


def active_heads(config: Any) -> list[int]:
    """The number of active heads of each layer's mixture; all heads without a mixture."""
    layers = [config.mixers_of_layer(layer) for layer in range(config.num_hidden_layers)]
    return [layer.get("mixture", {}).get("active_heads", config.num_attention_heads) for layer in layers]


def component_pairs(config: Any) -> list[Counts]:
    """The component heads of each layer's keys and values."""
    return [component_heads(config, layer) for layer in range(config.num_hidden_layers)]
