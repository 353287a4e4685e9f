"""Converts a crosshead model back to a stock checkpoint, where that is exact.

A linear map over the features of a head, or across heads, that precedes every nonlinear operation is multiplied into
the projection, one layer's attention tensors at a time, named relative to the attention module.
A mechanism that still has its neutral initial values is removed.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress, silent
from crosshead.common.torch_state import default_torch_state
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.mechanisms.base import HeadLayout, Settings

from .architectures.attention_names import attention_layers, attention_names
from .architectures.families import (
    FAMILIES,
    PREFIX,
    Shapes,
    architecture_of,
    family_of,
    kind_of,
    read_config,
    tensor_shapes,
    tied_tensors,
)
from .architectures.mixer_tensors import dropped_biases, mixers_layout, starting_values
from .compress.layer_rewrites import LayerRewrites, Tensors, combined, read_attention
from .gguf.export import check_type, run_gguf
from .keep_cache import WideHeads
from .plan import Plan, check_source, make_plan
from .sources.resolve import Source, open_source
from .sources.tensor_store import TensorStore
from .stages import Request, run
from .verification.tolerances import Tolerance, tolerance

CROSSHEAD_FIELDS = ("mixers", "expert_bias", "auto_map", "model_type", "architectures")
"""Fields of a crosshead config that the stock config lacks or defines differently."""
PROJECTIONS = {"query": ("q_proj", "q_b_proj"), "key": ("k_proj",), "value": ("v_proj", "kv_b_proj")}
"""Side -> projections whose rows compute it. In MLA, queries may come from `q_b_proj`, and the last rows of each head
in `kv_b_proj` compute its values."""


@default_torch_state()
def fold(
    model: str | Path,
    out: str | Path,
    *,
    keep_cache: bool = False,
    type: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = True,
    plan_only: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Convert a crosshead model to a stock model and return the report.

    With `keep_cache`, the stock model caches the component heads of `explicit`, not all heads (`keep_cache.py`).
    The report is written next to the folder as `<name>.conversion.json`, so that the folder contains no crosshead
    files. A run continues an unfinished run of the same fold, unless `restart` discards it. With `plan_only` nothing
    is written, and the report is the plan.

    If `out` ends in `.gguf`, it is a GGUF file for llama.cpp, of the given `type` (f32, f16, bf16, q8_0, q4_0, ...; by
    default the checkpoint's dtype). An interrupted run then starts again. A stock model is written as it is.
    """
    run_options = {"overwrite": overwrite, "verify": verify, "plan_only": plan_only}
    is_gguf = check_type(Path(out), type)
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(model, revision, scratch=Path(scratch))
        if is_gguf:
            if restart:
                raise ConversionError(f"restart has no effect on {out}: an interrupted GGUF file leaves nothing")
            is_stock = kind_of(source.config) == "stock" and not keep_cache
            request = copied(source) if is_stock else resolve(source, keep_cache)
            return run_gguf(request, Path(out), type, **run_options, progress=progress)
        request = resolve(source, keep_cache)
        return run(request, Path(out), **run_options, restart=restart, progress=progress)


@dataclass(frozen=True, kw_only=True)
class FoldRequest(Request):
    """A conversion of a crosshead model to a stock checkpoint, which needs no calibration."""

    command: str = "fold"
    cached_bytes: int = 0
    prepared: Plan
    """Plan that `resolve` made to check that every layer can be folded."""

    @classmethod
    def of(cls, source: Source, config: Any, plan: Plan, limit: Tolerance, keep_cache: bool = False) -> Self:
        """Return the request for a plan; `limit` is the tolerance of its result."""
        return cls(
            source=source,
            source_config=config,
            options={"keep_cache": True} if keep_cache else {},
            minimum_bytes=plan.size,
            computes=bool(plan.rewrites.layers),
            tolerance=limit,
            prepared=plan,
        )

    def plan(self) -> Plan:
        """Return the prepared plan."""
        return self.prepared


def resolve(source: Source, keep_cache: bool = False) -> FoldRequest:
    """Check that the source can be folded, plan every tensor, and return the request."""
    config = read_config(source.config, "crosshead", source.label)
    fields = {key: value for key, value in source.config.items() if key not in CROSSHEAD_FIELDS}
    fields["model_type"] = config.model_type.removeprefix(PREFIX)
    if keep_cache and family_of(config).is_encoder:
        raise ConversionError(f"--keep-cache is not for {fields['model_type']} models: fold without it")
    wide = WideHeads.of(config) if keep_cache else None
    if wide is not None:
        fields = wide.config_fields(config, fields)
    family = FAMILIES[fields["model_type"]]
    stock: Any = family.stock.from_dict(fields)
    stock.architectures = config.architectures
    stock.architectures = [architecture_of(stock)]  # `wide` may have changed the family
    shapes, source_shapes = (tensor_shapes(model_config, source.store.entries) for model_config in (stock, config))
    dropped = check_source(source.store, source_shapes, tied_tensors(config))
    dropped |= dropped_biases(source.store, source_shapes.keys() - shapes.keys())
    rewrites = fold_layers(source.store, config, shapes, wide)
    decisions = {} if wide is None else {"kept_cache": wide.report(config, stock, source.store)}
    plan = make_plan(source.store, stock, shapes, dropped, rewrites, decisions=decisions)
    rounded_to = {step.entry.dtype for step in plan.steps if step.action == "rewritten"}
    allowed = tolerance(stock, {"F32"} | rounded_to)
    if wide is not None and config.layout_of_layer(0).key_norm_eps is not None:
        allowed = replace(allowed, logits=None)  # inexact for scalars as small as the norm's eps
    return FoldRequest.of(source, config, plan, allowed, keep_cache)


def copied(source: Source) -> FoldRequest:
    """Return a request that copies a stock model, for its export to GGUF."""
    stock = read_config(source.config, "stock", source.label)
    shapes = tensor_shapes(stock, source.store.entries)
    dropped = check_source(source.store, shapes, tied_tensors(stock))
    plan = make_plan(source.store, stock, shapes, dropped, LayerRewrites({}, lambda layer: {}))
    return FoldRequest.of(source, stock, plan, tolerance(stock, ()))


def fold_layers(store: TensorStore, config: Any, shapes: Shapes, wide: WideHeads | None = None) -> LayerRewrites:
    """Return the rewrites that fold every layer; `ConversionError` if a layer cannot be folded.

    With `wide`, the component heads of `explicit` become the KV heads of the stock model.
    """
    applied = {layer: _mechanisms_to_apply(store, config, layer) for layer in attention_layers(config)}
    layers: dict[str, int] = {}
    for layer, mechanisms in applied.items():
        sides = {side for name in mechanisms for side in config.mixers_of_layer(layer)[name].get("on", ())}
        projections = [
            projection for side in (PROJECTIONS if wide else sorted(sides)) for projection in PROJECTIONS[side]
        ]
        projections += ["o_proj"] if wide else []
        parts = [f"{projection}.{part}" for projection in projections for part in ("weight", "bias")]
        names = [attention_names(config, layer).stored(part) for part in parts]
        layers |= {name: layer for name in names if name in shapes}

    def compute(layer: int) -> Tensors:
        names, layout = attention_names(config, layer), config.layout_of_layer(layer)
        tensors = read_attention(store, names)
        for name in applied[layer]:
            if name in PRODUCTS and (wide is None or name != "explicit"):
                tensors = multiply_projections(tensors, layout, name)
        tensors = tensors if wide is None else wide.rewrite(tensors, layout)
        return {names.stored(part): tensor for part, tensor in tensors.items()}

    return LayerRewrites(layers, compute)


def _mechanisms_to_apply(store: TensorStore, config: Any, layer: int) -> list[str]:
    """Return the mechanisms of a layer to fold: all that do not have their neutral initial values any more."""
    layout = mixers_layout(config, layer)
    applied = []
    for name, options in config.mixers_of_layer(layer).items():
        if RULES[name].starts_neutral(options, layout) and _has_starting_values(store, config, layer, name):
            continue
        if reason := _refusal(name, options, layout):
            raise ConversionError(f"{name!r} in layer {layer} cannot be folded into a stock layer: {reason}")
        applied.append(name)
    return applied


def _has_starting_values(store: TensorStore, config: Any, layer: int, mechanism: str) -> bool:
    """True if all tensors of a mechanism in a layer equal their initial values."""
    names, values = attention_names(config, layer), starting_values(config, layer, 0)
    parts = [part for part in values if part.startswith(f"mixers.{mechanism}.")]
    return all(torch.equal(stored := store.read(names.stored(part)), values[part].to(stored.dtype)) for part in parts)


# T (W_i x + b_i) for `knocking`, sum_j C_ij (W_j x + b_j) for `explicit`
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "knocking": partial(torch.einsum, "ef,hf...->he..."),
    "explicit": combined,
}
"""Mechanism -> function of its matrix and a projection's rows (heads, features, ...) that returns the new rows."""
NEVER = {
    "talking": "stock attention has no map across heads on logits or weights",
    "differential": "stock attention does not subtract one softmax from another",
    "gating": "its gates depend on the input; it only folds while its weight is zero, where every gate is 1",
    "bilinear": "its matrices have full rank; those of a stock layer are products of smaller ones",
}
"""Mechanism that cannot be folded, unless it has its neutral initial values -> reason."""


def multiply_projections(tensors: Tensors, layout: HeadLayout, mechanism: str) -> Tensors:
    """Return the tensors with the matrices of `knocking` or `explicit` multiplied into the rows of the projections."""
    folded = dict(tensors)
    for side, projections in PROJECTIONS.items():
        matrix = tensors.get(f"mixers.{mechanism}.{side}.weight")
        for name in (f"{projection}.{part}" for projection in projections for part in ("weight", "bias")):
            if matrix is not None and name in tensors:
                size = layout.value_dim or layout.head_dim if side == "value" else layout.head_dim
                rows_per_head = len(tensors[name]) // layout.key_value_heads if name.startswith("kv_b_proj.") else size
                rows = tensors[name].unflatten(0, (-1, rows_per_head))
                keys, rows = rows[:, : rows_per_head - size], rows[:, rows_per_head - size :]
                rows = PRODUCTS[mechanism](matrix, rows)
                folded[name] = (torch.cat([keys, rows], dim=1) if keys.numel() else rows).flatten(0, 1)
    return folded


def _refusal(mechanism: str, settings: Settings, layout: HeadLayout) -> str | None:
    """Return the reason why a mechanism cannot be folded into a stock layer; None if it can."""
    if mechanism == "knocking":
        form = settings["form"]
        return None if form == "linear" else f"its form={form!r} is not linear; only form='linear' folds"
    if mechanism == "explicit":
        return "with norm=true its scale depends on the input; only norm=false folds" if settings["norm"] else None
    if mechanism == "mixture":
        active, heads, gate = settings["active_heads"], layout.output_heads, settings["gate"]
        if active == heads and gate == "binary":
            return None
        return (
            f"a stock layer has no router (this one has active_heads={active} of {heads}, gate={gate!r}); only all "
            "heads with gate='binary' fold"
        )
    return NEVER.get(mechanism, "it has no fold rule")
