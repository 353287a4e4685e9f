"""Computes the attention tensors of a crosshead model from a stock checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from statistics import fmean
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.attention_names import AttentionNames, attention_layers, attention_names, layer_parts
from ..architectures.families import Shapes
from ..architectures.mixer_tensors import layer_mixers, mixers_layout, starting_values
from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..mixers import MixerRequest
from ..sources.tensor_store import TensorStore
from .component_heads import ComponentHeads
from .fitted_router import Routing
from .head_groups import Counts
from .initial_weights import makes_pairs, multiply_projections, pair_heads, paired_names
from .layer_rewrites import LayerRewrites, Tensors, read_attention
from .reorder_heads import most_used_first, reorder

GROUP_TOLERANCE = 0.1
"""Maximum relative increase of the fitted error over that of one group, when the number of groups is chosen."""
ORDER_FREE = {"explicit", "knocking", "gating"}
"""Mechanisms whose initial values are valid for any order of heads."""

ROUTER = "mixers.mixture.routed.weight"
"""Part of the fitted router's weight."""
ROUTED_PARTS = [*(f"{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")), "o_proj.weight"]
"""Parts of a layer with a fitted router that the joint fit changes."""


@dataclass(frozen=True)
class LayerRequest:
    """Mechanisms of one layer of the target, and the options of their conversion."""

    index: int
    mixers: dict[str, dict[str, Any]]
    """Mechanism -> options in the target's config."""
    choices: Mapping[str, Mapping[str, Any]]
    """Mechanism -> options that only the conversion has."""
    layout: HeadLayout
    names: AttentionNames
    components: tuple[int, int]
    """Component heads of keys and of values."""

    @property
    def method(self) -> str | None:
        """Method of `explicit`; None without `explicit`."""
        return self.choices.get("explicit", {}).get("method")

    @property
    def has_fewer_components(self) -> bool:
        """True if keys or values have fewer components than heads."""
        return "explicit" in self.mixers and min(self.components) < self.layout.key_value_heads

    def counts(self, groups: int | None = None) -> Counts:
        """Return the component counts; `aligned` reorders heads for groups if no mechanism depends on the order."""
        groups = groups or self.mixers.get("explicit", {}).get("groups", 1)
        reorders = self.method == "aligned" and groups > 1 and self.mixers.keys() <= ORDER_FREE
        return Counts(*self.components, groups, reorders)

    def component_heads(self) -> ComponentHeads:
        """Return the component heads, with the method that fits them."""
        return ComponentHeads(self.layout, self.counts(), self.choices["explicit"]["method"])

    @property
    def shares_most_used(self) -> bool:
        """True if the most used heads are moved to the front, as the shared heads of the mixture."""
        shared = self.mixers.get("mixture", {}).get("shared_heads", 0)
        return shared > 0 and self.choices.get("mixture", {}).get("shared") == "calibrated"

    @property
    def active_heads(self) -> int:
        """Number of active heads of the mixture; all heads if there is no mixture."""
        return self.mixers.get("mixture", {}).get("active_heads", self.layout.query_heads)

    @property
    def routing(self) -> Routing | None:
        """Shared and active heads of a mixture whose router is fitted; None for other layers."""
        mixture = self.mixers.get("mixture")
        if mixture is None or self.choices["mixture"]["method"] != "calibrated":
            return None
        selects = mixture["active_heads"] < self.layout.query_heads
        components = self.component_heads().label if self.has_fewer_components else ""
        return Routing(mixture["shared_heads"], mixture["active_heads"], components) if selects else None

    def changed_parts(self, jointly: bool) -> list[str]:
        """Return the parts of the stock tensors that are computed, also by a joint fit of all layers if `jointly`.

        Lists biases even if the model has none.
        """
        parts = list[str]()
        if self.has_fewer_components:
            parts += self.component_heads().rewritten_names()
        if self.shares_most_used:
            parts += ["o_proj.weight", *(f"{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias"))]
        if self.routing is not None:
            parts += ROUTED_PARTS if jointly else ["o_proj.weight"]
        if "bilinear" in self.mixers:
            parts += ["q_proj.weight", "o_proj.weight"]
        if makes_pairs(self.mixers.get("differential")):
            parts += paired_names(self.mixers["differential"])
        return parts

    def rewritten(self, store: TensorStore, statistics: Mapping[str, Tensors]) -> Tensors:
        """Return the attention tensors by part after all rewrites but that of `differential`; {} if there are none."""
        is_bilinear = "bilinear" in self.mixers
        if not (self.has_fewer_components or self.shares_most_used or self.routing or is_bilinear):
            return {}
        tensors, layout = self.compressed(store, statistics), self.layout
        if self.shares_most_used:
            shared = self.mixers["mixture"]["shared_heads"]
            order = most_used_first(statistics["use"]["counts"], layout.key_value_heads, shared)
            tensors = reorder(tensors, order, layout)
        return multiply_projections(tensors, layout) if is_bilinear else tensors

    def compressed(self, store: TensorStore, statistics: Mapping[str, Tensors]) -> Tensors:
        """Return the attention tensors by part with component heads and with a fitted router."""
        tensors, routing = read_attention(store, self.names), self.routing
        if self.has_fewer_components:
            heads = HeadStatistics(self.layout, statistics["statistics"]) if "statistics" in statistics else None
            tensors = self.component_heads().rewrite(tensors, heads)
        if routing is not None:  # fitted to the output projection after `rewrite`
            fitted = statistics["router"]
            scores, change = (fitted[name] for name in routing.names())
            tensors[ROUTER] = scores
            tensors["o_proj.weight"] = tensors["o_proj.weight"] + change
            for part in tensors.keys() & {*self.jointly_fitted_parts()}:
                changed = fitted.get(routing.name(f"joint.{part}"), tensors[part])
                if changed.shape != tensors[part].shape:
                    raise ConversionError(f"the calibration does not fit: {self.joint_name(part)} has another shape")
                tensors[part] = changed.to(tensors[part])
        return tensors

    def jointly_fitted_parts(self) -> list[str]:
        """Return the parts that the joint fit of all layers changes; lists biases even if the model has none."""
        is_aligned = self.method == "aligned" and self.has_fewer_components
        component_parts = self.component_heads().fitted_parts() if is_aligned else []
        return sorted({*component_parts, *(ROUTED_PARTS if self.routing is not None else [])})

    def joint_name(self, part: str) -> str:
        """Return the name of a jointly fitted tensor in a calibration file."""
        routing = self.routing
        if routing is not None:
            return f"{self.index}.router.{routing.name(f'joint.{part}')}"
        return f"{self.index}.statistics.{self.component_heads().fitted_name(part)}"


def layer_requests(config: Any, request: MixerRequest) -> list[LayerRequest]:
    """Return the request for each attention layer of the target."""
    parts, layers = layer_parts(config), list[LayerRequest]()
    for layer in attention_layers(config):
        part_request = request.parts.get(parts[layer][0]) if parts else request
        choices = part_request.choices if part_request else {}
        mixers, layout = config.mixers_of_layer(layer), config.layout_of_layer(layer)
        names, mixed = attention_names(config, layer), mixers_layout(config, layer)
        components = mixed.key_components, mixed.value_components
        layers.append(LayerRequest(layer, mixers, choices, layout, names, components))
    return layers


def convert_layers(
    store: TensorStore,
    config: Any,
    shapes: Shapes,
    request: MixerRequest,
    calibration: Calibration | None,
    seed: int,
    jointly: bool,
) -> LayerRewrites:
    """Return the rewrites that add the mechanisms to every layer; `config` and `shapes` are the target's.

    `jointly` is true if the calibration may have tensors of a joint fit of all layers.
    """
    requests = layer_requests(config, request)
    layers: dict[str, int] = {}
    for layer in requests:
        changed = {layer.names.stored(part) for part in layer.changed_parts(jointly)} & shapes.keys()
        created = {name for name in shapes if name.startswith(layer.names.stored("mixers."))}
        layers |= dict.fromkeys(created | changed, layer.index)

    def compute(index: int) -> Tensors:
        layer, tensors = requests[index], starting_values(config, index, seed)
        if makes_pairs(layer.mixers.get("differential")):
            mechanism: Any = layer_mixers(config, index)["differential"]
            tensors |= pair_heads(read_attention(store, layer.names), tensors, layer.layout, mechanism)
        else:
            tensors |= layer.rewritten(store, calibration.layer(index) if calibration is not None else {})
        return {layer.names.stored(part): tensor for part, tensor in tensors.items()}

    return LayerRewrites(layers, compute)


def needed_observations(layers: Sequence[LayerRequest], chooses: bool) -> set[str]:
    """Return the kinds of statistics to record: any of "statistics", "use" and "router".

    `chooses` is true if `--layers auto` chooses the component heads later.
    """
    aligned = [layer for layer in layers if layer.method == "aligned"]
    needed = {"statistics"} if any(chooses or layer.has_fewer_components for layer in aligned) else set()
    needed |= {"use"} if any(layer.shares_most_used for layer in layers) else set()
    return needed | ({"router"} if any(layer.routing for layer in layers) else set())


def candidate_counts(layers: Sequence[LayerRequest], request: MixerRequest) -> list[list[Counts]]:
    """Return, per layer, the component counts for every number of groups to choose from, the largest number first."""
    group_counts: list[int | None] = [None]  # the configured number
    if (
        request.choices.get("explicit", {}).get("method") == "aligned"
        and "groups" not in request.mixers["explicit"]
        and "mixture" not in request.mixers
        and any(layer.has_fewer_components for layer in layers)
    ):
        common = gcd(layers[0].layout.key_value_heads, *(count for layer in layers for count in layer.components))
        group_counts = [groups for groups in range(common, 0, -1) if common % groups == 0]
    return [[layer.counts(groups) for groups in group_counts] for layer in layers]


def choose_groups(
    candidates: list[list[Counts]], layers: Sequence[LayerRequest], request: MixerRequest, calibration: Calibration
) -> tuple[MixerRequest, dict[str, Any]]:
    """Return the request with the most groups whose fitted error is within the tolerance, and the record of it."""
    ratios: dict[int, list[float]] = {}
    for layer in layers:
        if not layer.has_fewer_components:
            continue
        statistics = HeadStatistics(layer.layout, calibration.layer(layer.index)["statistics"])
        alternatives = [ComponentHeads(layer.layout, counts) for counts in candidates[layer.index]]
        errors = {heads.counts.groups: heads.fitted_error(statistics) for heads in alternatives}
        for groups, error in errors.items():
            ratios.setdefault(groups, []).append(error / errors[1])
    means = {groups: fmean(layer_ratios) for groups, layer_ratios in ratios.items()}
    groups = max((groups for groups, mean in means.items() if mean <= 1 + GROUP_TOLERANCE), default=1)
    explicit = request.mixers["explicit"] | {"groups": groups}
    chosen = {"groups": groups, "fitted_errors": {str(count): round(mean, 4) for count, mean in means.items()}}
    return replace(request, mixers=request.mixers | {"explicit": explicit}), chosen
