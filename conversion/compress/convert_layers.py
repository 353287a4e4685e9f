"""Computes the attention tensors of a crosshead model from those of a stock checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from statistics import fmean
from typing import Any

from ..architectures.attention_names import attention_layers, attention_names
from ..architectures.families import Shapes
from ..architectures.mixer_tensors import component_heads, layer_mixers, starting_values
from ..architectures.stacks import places_of
from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..options import MixerRequest
from ..sources.tensor_store import TensorStore
from .fitted_router import Routing
from .full_matrices import multiply_projections
from .head_groups import Counts
from .layer_rewrites import LayerRewrites, Tensors, read_attention
from .paired_heads import makes_pairs, pair_heads, paired_names
from .reorder_heads import most_used_first, reorder
from .virtual_heads import fitted_error, rewrite, rewritten_names

GROUP_TOLERANCE = 0.1
"""How much the fitted error may rise, relative to that of one group, if a conversion chooses the number of groups."""
ORDER_FREE = {"explicit", "knocking", "gating"}
"""Mechanisms that a conversion can combine with any order of heads."""


def _choices(config: Any, request: MixerRequest, layer: int) -> Mapping[str, Mapping[str, Any]]:
    """The options of the conversion for one layer."""
    places = places_of(config)
    of_part = request.parts.get(places[layer][0]) if places else request
    return of_part.choices if of_part else {}


def _is_aligned(config: Any, request: MixerRequest, layer: int) -> bool:
    return _choices(config, request, layer).get("explicit", {}).get("method") == "aligned"


def _has_fewer_components(config: Any, layer: int) -> bool:
    """Whether keys or values of the target have fewer components than heads."""
    has_components = "explicit" in config.mixers_of_layer(layer)
    return has_components and min(component_heads(config, layer)) < config.num_key_value_heads


def _counts(config: Any, request: MixerRequest, layer: int, groups: int | None = None) -> Counts:
    """The component heads of a layer; `aligned` assigns heads to groups where nothing depends on their order."""
    mixers = config.mixers_of_layer(layer)
    groups = groups or mixers.get("explicit", {}).get("groups", 1)
    reorders = _is_aligned(config, request, layer) and groups > 1 and mixers.keys() <= ORDER_FREE
    return Counts(*component_heads(config, layer), groups, reorders)


def _reorders(config: Any, request: MixerRequest, layer: int) -> bool:
    """Whether the most used heads are to come first."""
    shared = config.mixers_of_layer(layer).get("mixture", {}).get("shared_heads", 0)
    return shared > 0 and _choices(config, request, layer).get("mixture", {}).get("shared") == "calibrated"


def _routing(config: Any, request: MixerRequest, layer: int) -> Routing | None:
    """The heads of a mixture whose router is fitted; None for other layers."""
    mixture = config.mixers_of_layer(layer).get("mixture")
    if mixture is None or _choices(config, request, layer)["mixture"]["method"] != "calibrated":
        return None
    selects = mixture["active_heads"] < config.num_attention_heads
    return Routing(mixture["shared_heads"], mixture["active_heads"]) if selects else None


def convert_layers(
    store: TensorStore, config: Any, shapes: Shapes, request: MixerRequest, calibration: Calibration | None, seed: int
) -> LayerRewrites:
    """The rewrites that add the mechanisms to every layer; `config` and `shapes` are the target's."""
    layers: dict[str, int] = {}
    for layer in attention_layers(config):
        layers |= dict.fromkeys(_changed_names(config, shapes, request, layer), layer)

    def compute(layer: int) -> Tensors:
        statistics = calibration.layer(layer) if calibration is not None else {}
        names, tensors = attention_names(config, layer), starting_values(config, layer, seed)
        if makes_pairs(config.mixers_of_layer(layer).get("differential")):
            layout = config.layout_of_layer(layer)
            mechanism: Any = layer_mixers(config, layer)["differential"]
            tensors |= pair_heads(read_attention(store, names), tensors, layout, mechanism)
        else:
            tensors |= _rewritten(store, config, request, statistics, layer)
        return {names.stored(part): tensor for part, tensor in tensors.items()}

    return LayerRewrites(layers, compute)


def _changed_names(config: Any, shapes: Shapes, request: MixerRequest, layer: int) -> set[str]:
    names, parts = attention_names(config, layer), list[str]()
    if _has_fewer_components(config, layer):
        method = _choices(config, request, layer)["explicit"]["method"]
        parts += rewritten_names(config.layout_of_layer(layer), _counts(config, request, layer), method)
    if _reorders(config, request, layer):
        parts += ["o_proj.weight", *(f"{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias"))]
    if _routing(config, request, layer) is not None:
        parts.append("o_proj.weight")
    if "bilinear" in config.mixers_of_layer(layer):
        parts += ["q_proj.weight", "o_proj.weight"]
    differential = config.mixers_of_layer(layer).get("differential")
    if makes_pairs(differential):
        parts += paired_names(differential)
    created = {name for name in shapes if name.startswith(names.stored("mixers."))}
    return created | ({names.stored(part) for part in parts} & shapes.keys())


def _rewritten(
    store: TensorStore, config: Any, request: MixerRequest, statistics: dict[str, Tensors], layer: int
) -> Tensors:
    combines, reorders = _has_fewer_components(config, layer), _reorders(config, request, layer)
    routing, is_bilinear = _routing(config, request, layer), "bilinear" in config.mixers_of_layer(layer)
    if not (combines or reorders or routing or is_bilinear):
        return {}
    tensors, layout = read_attention(store, attention_names(config, layer)), config.layout_of_layer(layer)
    if combines:
        heads = HeadStatistics(layout, statistics["statistics"]) if "statistics" in statistics else None
        method = _choices(config, request, layer)["explicit"]["method"]
        tensors = rewrite(tensors, heads, layout, _counts(config, request, layer), method)
    if routing is not None:  # fitted to the output projection after `rewrite`
        scores, change = (statistics["router"][name] for name in routing.names())
        tensors["mixers.mixture.routed.weight"] = scores
        tensors["o_proj.weight"] = tensors["o_proj.weight"] + change
    if reorders:
        shared = config.mixers_of_layer(layer)["mixture"]["shared_heads"]
        order = most_used_first(statistics["use"]["counts"], layout.key_value_heads, shared)
        tensors = reorder(tensors, order, layout)
    return multiply_projections(tensors, layout) if is_bilinear else tensors


def needed_observations(config: Any, request: MixerRequest, chooses: bool) -> set[str]:
    """The kinds of statistics to record, of "statistics", "use" and "router".

    `chooses` is true if `--layers auto` is still to choose the component heads.
    """
    layers = attention_layers(config)
    aligned = [layer for layer in layers if _is_aligned(config, request, layer)]
    needed = {"statistics"} if any(chooses or _has_fewer_components(config, layer) for layer in aligned) else set()
    needed |= {"use"} if any(_reorders(config, request, layer) for layer in layers) else set()
    return needed | ({"router"} if any(routings(config, request)) else set())


def routings(config: Any, request: MixerRequest) -> list[Routing | None]:
    """The heads of each layer's mixture for which a router is fitted."""
    return [_routing(config, request, layer) for layer in attention_layers(config)]


def active_heads(config: Any) -> list[int]:
    """The number of active heads of each layer's mixture; all heads without a mixture."""
    layers = [config.mixers_of_layer(layer) for layer in attention_layers(config)]
    return [layer.get("mixture", {}).get("active_heads", config.num_attention_heads) for layer in layers]


def component_counts(config: Any, request: MixerRequest) -> list[Counts]:
    """The component heads of each layer's keys and values."""
    return [_counts(config, request, layer) for layer in attention_layers(config)]


def candidate_counts(config: Any, request: MixerRequest) -> list[list[Counts]]:
    """The component heads of each layer, for every number of groups that a conversion chooses from, the most first."""
    tried, layers = _groups_to_try(config, request), attention_layers(config)
    return [[_counts(config, request, layer, groups) for groups in tried] for layer in layers]


def _groups_to_try(config: Any, request: MixerRequest) -> list[int | None]:
    """The numbers of groups that are possible in all layers; only None, the configured one, if it is not chosen."""
    explicit, choices = request.mixers.get("explicit", {}), request.choices
    fits = choices.get("explicit", {}).get("method") == "aligned" and "mixture" not in request.mixers
    layers = attention_layers(config)
    if "groups" in explicit or not fits or not any(_has_fewer_components(config, layer) for layer in layers):
        return [None]
    counts = [component_heads(config, layer) for layer in layers]
    common = gcd(config.num_key_value_heads, *(count for pair in counts for count in pair))
    return [groups for groups in range(common, 0, -1) if common % groups == 0]


def choose_groups(
    candidates: list[list[Counts]], config: Any, request: MixerRequest, calibration: Calibration
) -> tuple[MixerRequest, dict[str, Any]]:
    """The request with the most groups whose fitted error is within the tolerance; and the groups and the errors."""
    ratios: dict[int, list[float]] = {}
    for layer in filter(lambda layer: _has_fewer_components(config, layer), attention_layers(config)):
        layout = config.layout_of_layer(layer)
        statistics = HeadStatistics(layout, calibration.layer(layer)["statistics"])
        errors = {counts.groups: fitted_error(statistics, layout, counts) for counts in candidates[layer]}
        for groups, error in errors.items():
            ratios.setdefault(groups, []).append(error / errors[1])
    means = {groups: fmean(of_layers) for groups, of_layers in ratios.items()}
    groups = max(groups for groups, mean in means.items() if mean <= 1 + GROUP_TOLERANCE)
    explicit = request.mixers["explicit"] | {"groups": groups}
    chosen = {"groups": groups, "fitted_errors": {str(count): round(mean, 4) for count, mean in means.items()}}
    return replace(request, mixers=request.mixers | {"explicit": explicit}), chosen
