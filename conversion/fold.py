"""Converts a crosshead model back to a stock checkpoint, where that is exact.

Each rule of a mechanism works on one layer's attention tensors, by their names within the attention. A map that is
linear in the features of a head, or across heads, before anything nonlinear is multiplied into the projection. A
mechanism that is unchanged since its neutral start is left out.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress, silent
from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.mechanisms.base import HeadLayout, Settings

from .architectures.families import Family, Shapes, family_of, layer_prefix, read_config, stock_shapes
from .architectures.mixer_tensors import dropped_biases, mixed_shapes, starting_values
from .compress.layer_rewrites import ATTENTION, LayerRewrites, Tensors, full_names, read_attention
from .plan import Plan, check_source, make_plan
from .sources.resolve import Source, open_source
from .sources.tensor_store import TensorStore
from .stages import Request, dry_run, run
from .verification.tolerances import tolerance

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
    plan_only: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Convert a crosshead model to its stock family; returns the report.

    The report is written next to the folder as `<name>.conversion.json`, so that the folder holds nothing of
    crosshead. A run continues an unfinished one of the same fold, unless `restart` discards its work. With `plan_only`
    nothing is written, and the report is the plan.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request = resolve(open_source(model, revision, scratch=Path(scratch)))
        if plan_only:
            return dry_run(request, Path(out), overwrite=overwrite, progress=progress)
        return run(request, Path(out), overwrite=overwrite, restart=restart, verify=verify, progress=progress)


@dataclass(frozen=True, kw_only=True)
class FoldRequest(Request):
    """A conversion of a crosshead model to a stock checkpoint; nothing in it depends on a text."""

    target: Plan

    def plan(self, calibration: Any) -> Plan:
        """The plan, which was made to check the request."""
        return self.target


def resolve(origin: Source) -> FoldRequest:
    """Check the request, and plan every tensor."""
    mixed = read_config(origin.config, "mixed", origin.origin["name"])
    family = family_of(mixed)
    stock = _stock_config(origin.config, family)
    shapes = stock_shapes(stock)
    dropped = check_source(origin.store, mixed_shapes(mixed, shapes), mixed.tie_word_embeddings)
    dropped |= dropped_biases(origin.store, mixed, shapes)
    rewrites = fold_layers(origin.store, mixed, shapes)
    plan = make_plan(origin.store, stock, shapes, dropped, rewrites)
    rounded_to = {step.entry.dtype for step in plan.steps if step.action == "rewritten"}
    return FoldRequest(
        command="fold",
        source=origin,
        source_config=mixed,
        options={},
        least_bytes=plan.size,
        cached_bytes=0,
        computes=bool(rewrites.layers),
        tolerance=tolerance(stock, {"F32"} | rounded_to),
        target=plan,
    )


def _stock_config(content: dict[str, Any], family: Family) -> Any:
    config = family.stock.from_dict({key: value for key, value in content.items() if key not in OURS})
    config.architectures = [family.architecture]
    return config


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


PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@dataclass(frozen=True)
class FoldRule:
    """One mechanism's way back."""

    refusal: Callable[[Settings, HeadLayout], str | None]
    """Why it cannot fold, whatever its values; None where it can."""
    apply: Callable[[Tensors, HeadLayout], Tensors]
    """The layer's tensors with the mechanism worked in; its own are taken away by the caller."""


def fold_knocking(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """`T (W_i x + b_i)` is a projection: every head's rows, mapped."""
    return _folded(tensors, layout, "knocking", "ef,hf...->he...")


def fold_explicit(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """`sum_j C_ij (W_j x + b_j)` is a projection: combined heads' rows from components' rows."""
    return _folded(tensors, layout, "explicit", "ij,jf...->if...")


def _folded(tensors: Tensors, layout: HeadLayout, mechanism: str, product: str) -> Tensors:
    """A mechanism's matrix times the rows (heads, features, ...) of each projection it has one for."""
    folded = dict(tensors)
    for side, projection in PROJECTIONS.items():
        matrix = tensors.get(f"mixers.{mechanism}.{side}.weight")
        for name in (f"{projection}.weight", f"{projection}.bias"):
            if matrix is not None and name in tensors:
                rows = tensors[name].unflatten(0, (-1, layout.head_dim))
                folded[name] = torch.einsum(product, matrix, rows).flatten(0, 1)
    return folded


def keep(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Nothing to work in."""
    return tensors


def refuse_knocking(settings: Settings, layout: HeadLayout) -> str | None:
    """Only the linear form is a matrix."""
    form = settings["form"]
    return None if form == "linear" else f"its form={form!r} is not linear; only form='linear' folds"


def refuse_explicit(settings: Settings, layout: HeadLayout) -> str | None:
    """The norm over head outputs depends on the input."""
    return "its norm=true divides by what the input makes of it; only norm=false folds" if settings["norm"] else None


def refuse_mixture(settings: Settings, layout: HeadLayout) -> str | None:
    """A head that may be off cannot be always on."""
    active, heads, gate = settings["active_heads"], layout.output_heads, settings["gate"]
    if active == heads and gate == "binary":
        return None
    return (
        f"a stock layer has every head on, and this one routes (active_heads={active} of {heads}, gate={gate!r}); "
        "only all heads with gate='binary' fold"
    )


def refuse_talking(settings: Settings, layout: HeadLayout) -> str | None:
    """Stock attention has no place between logits and softmax."""
    return "stock attention has no map across heads on logits or weights"


def refuse_gating(settings: Settings, layout: HeadLayout) -> str | None:
    """A gate that has moved depends on the input."""
    return "its gates depend on the input; it only folds while its weight is zero, where every gate is 1"


def refuse_differential(settings: Settings, layout: HeadLayout) -> str | None:
    """Stock attention has one softmax a head."""
    return "stock attention does not subtract one softmax from another"


FOLD_RULES: dict[str, FoldRule] = {
    "knocking": FoldRule(refuse_knocking, fold_knocking),
    "explicit": FoldRule(refuse_explicit, fold_explicit),
    "mixture": FoldRule(refuse_mixture, keep),
    "talking": FoldRule(refuse_talking, keep),
    "differential": FoldRule(refuse_differential, keep),
    "gating": FoldRule(refuse_gating, keep),
}
"""Mechanism -> its way back; one without an entry does not fold."""
