"""Converts a crosshead model back to a stock checkpoint, where that is exact."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import RULES

from .architectures.families import Family, Shapes, family_of, layer_prefix, read_config, stock_shapes
from .architectures.mixer_tensors import dropped_biases, mixed_shapes, starting_values
from .compress.fold_rules import FOLD_RULES, PROJECTIONS
from .compress.layer_rewrites import ATTENTION, LayerRewrites, Tensors, full_names, read_attention
from .plan import check_source, make_plan
from .sources.resolve import Source, open_source
from .sources.tensor_store import TensorStore
from .verification.tolerances import tolerance
from .verification.verify import verifier
from .writing.writer import Fitted, Progress, Request, run, silent


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


OURS = ("mixers", "expert_bias", "auto_map", "model_type", "architectures")
"""Fields of our configuration that the stock one has not, or has otherwise."""


def fold(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = True,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Take a crosshead model back to its stock family; returns the report.

    The report is kept beside the folder as `<name>.conversion.json`: in the folder itself is nothing of ours. A run
    goes on from what an unfinished one of the same fold has left, unless `restart` discards it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        origin = open_source(model, revision, scratch=Path(scratch))
        return run(resolve(origin), Path(out), overwrite, restart, verifier(origin) if verify else None, progress)


@dataclass(frozen=True, kw_only=True)
class FoldRequest(Request):
    """A conversion of a crosshead model to a stock checkpoint."""

    fitted: Fitted

    def fit(self, keep: Callable[[str], Path], progress: Progress) -> Fitted:
        """Nothing depends on a text."""
        return self.fitted


def resolve(origin: Source) -> FoldRequest:
    """Check the request, and plan every tensor."""
    mixed = read_config(origin.config, "mixed", origin.origin["name"])
    family = family_of(mixed)
    stock = _stock_config(origin.config, family)
    shapes = stock_shapes(stock)
    dropped = check_source(origin.store, mixed_shapes(mixed, shapes), mixed.tie_word_embeddings)
    dropped |= dropped_biases(origin.store, mixed, shapes)
    rewrites = fold_layers(origin.store, mixed, shapes)
    plan = make_plan(origin.store, shapes, dropped, rewrites.layers, None)
    rounded_to = {step.entry.dtype for steps in plan.shards.values() for step in steps if step.action == "rewritten"}
    return FoldRequest(
        command="fold",
        source=origin,
        options={},
        least_bytes=plan.size,
        cached_bytes=0,
        computes=bool(rewrites.layers),
        tolerance=tolerance(stock, {"F32"} | rounded_to),
        fitted=Fitted(stock, plan, rewrites, {}),
    )


def _stock_config(content: dict[str, Any], family: Family) -> Any:
    config = family.stock.from_dict({key: value for key, value in content.items() if key not in OURS})
    config.architectures = [family.architecture]
    return config
