"""Calibration: activation statistics of heads, recorded layer by layer while the source runs, in one file."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance, Counter, Progress
from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.families import HEAD, Shapes, tensor_shapes
from ..compress.component_heads import ComponentHeads
from ..compress.fitted_output import AttentionCalls
from ..compress.fitted_router import Routing, fit_router, recorded, routed
from ..compress.fitted_steps import solve_layer
from ..compress.head_groups import Counts
from ..compress.layer_rewrites import Tensors, substituted
from ..compress.reorder_heads import HeadUse
from ..sources.resolve import Source
from ..sources.tensor_store import TensorStore
from ..writing.shard_writer import digest_of, write_streamed
from .head_statistics import HeadStatistics, fast_products, full_products
from .streamed import stream
from .streamed_model import StreamedModel, check_hidden
from .text import Text

FINGERPRINT = "fingerprint"
"""Metadata key of a calibration file for the fingerprint of the model."""
Observer = HeadStatistics | HeadUse


@dataclass(frozen=True)
class Observers:
    """The statistics to record and the tensors to fit in each layer."""

    kinds: set[str]
    """Any of "statistics" (for component heads), "use" (for the order of heads) and "router" (for fitted routers)."""
    layouts: list[HeadLayout]
    active: list[int]
    """Number of active heads per layer."""
    biased: bool
    """True if the key and value projections have biases."""
    candidates: list[list[Counts]] = field(default_factory=list)
    """Per layer, the component counts for which tensors are fitted: one entry for each number of groups to choose
    from. Empty if not known yet."""
    routings: list[Routing | None] = field(default_factory=list)
    """Per layer, shared and active heads of the mixture, for the kind "router"; None if no heads are selected."""

    def of_layer(self, layer: int) -> dict[str, Observer]:
        """Return new observers for a layer, by kind."""
        layout = self.layouts[layer]
        observers: dict[str, Observer] = {}
        if "statistics" in self.kinds:
            observers["statistics"] = HeadStatistics(layout)
        if "use" in self.kinds:
            observers["use"] = HeadUse(layout.query_heads, self.active[layer])
        return observers

    def routing(self, layer: int) -> Routing | None:
        """Return the shared and active heads for which a layer's router is fitted, or None."""
        return self.routings[layer] if "router" in self.kinds else None

    def fitted_counts(self, layer: int) -> list[Counts]:
        """Return the component counts for which a layer is fitted."""
        if "statistics" not in self.kinds or not self.candidates:
            return []
        heads = self.layouts[layer].key_value_heads
        return [counts for counts in self.candidates[layer] if min(counts.sides.values()) < heads]

    @property
    def chooses_groups(self) -> bool:
        """True if the number of groups is chosen from the statistics."""
        return any(len(counts) > 1 for counts in self.candidates)

    def shapes(self) -> Shapes:
        """Return the names and shapes of the statistics in a calibration file."""
        shapes: Shapes = {}
        for layer, layout in enumerate(self.layouts):
            shapes_of_kind = {"statistics": HeadStatistics.shapes(layout, self.biased), "use": HeadUse.shapes(layout)}
            if (routing := self.routing(layer)) is not None:
                shapes_of_kind["router"] = routing.shapes(layout)
            for kind in self.kinds & shapes_of_kind.keys():
                shapes |= {f"{layer}.{kind}.{name}": shape for name, shape in shapes_of_kind[kind].items()}
        return shapes

    def fitted_shapes(self) -> Shapes:
        """Return the names and shapes of the fitted tensors in a calibration file."""
        shapes: Shapes = {}
        for layer, layout in enumerate(self.layouts):
            for counts in self.fitted_counts(layer):
                layer_shapes = ComponentHeads(layout, counts).shapes_of_fitted(self.biased)
                shapes |= {f"{layer}.statistics.{name}": shape for name, shape in layer_shapes.items()}
        return shapes

    def cached_size(self, chooses_active: bool) -> int:
        """Upper bound, in bytes, of the files with statistics, fits of layers and the joint fit.

        `chooses_active` is true if `--active` chooses the layers that have a fitted router.
        """
        most = [max(1, layout.key_value_heads - 1) for layout in self.layouts]
        fitted = self if self.candidates else replace(self, candidates=[[Counts(heads, heads)] for heads in most])
        size = sum(8 * prod(shape) for shape in (self.shapes() | fitted.fitted_shapes()).values())
        routed = 0
        if chooses_active or "router" in self.kinds:
            for layout in self.layouts:
                value_dim = layout.value_dim or layout.head_dim
                rows = layout.query_heads * (1 + layout.head_dim + 2 * value_dim)
                rows += layout.key_value_heads * (layout.head_dim + value_dim)
                routed += 8 * (layout.hidden_size + 1) * rows
        return 3 * size + 2 * routed


@dataclass(frozen=True)
class Calibration:
    """A calibration file, read one layer at a time."""

    path: Path

    def layer(self, layer: int) -> dict[str, Tensors]:
        """Return the tensors of a layer by kind ("statistics", "use", "router") and name."""
        tensors: dict[str, Tensors] = {}
        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                index, kind, part = name.split(".", 2)
                if int(index) == layer:
                    tensors.setdefault(kind, {})[part] = file.get_tensor(name)
        return tensors

    def check(self, observers: Observers, fingerprint: Callable[[], str] | None = None) -> None:
        """Raise `ConversionError` if the file is not a calibration, or was made for another model or other statistics.

        `fingerprint` returns the model's fingerprint; it is slow, so it is called last.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                stored_fingerprint = (file.metadata() or {}).get(FINGERPRINT)
                stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"--calibration {self.path} cannot be read as a calibration: {error}") from None
        fitted_shapes = {name: shape for name, shape in observers.fitted_shapes().items() if name in stored}
        for name, shape in (observers.shapes() | fitted_shapes).items():
            if stored.get(name) != shape:
                problem = f"has the shape {stored[name]} instead of {shape}" if name in stored else "is missing"
                raise ConversionError(
                    f"--calibration {self.path} does not fit ({name} {problem}): it was made for another model or "
                    "another conversion"
                )
        if fingerprint is None:
            return
        if not stored_fingerprint:
            raise ConversionError(
                f"--calibration {self.path} has no fingerprint of the weights that it was made for (earlier versions "
                "wrote none): calibrate again on the text, with --save-calibration"
            )
        if stored_fingerprint != fingerprint():
            raise ConversionError(
                f"--calibration {self.path} does not fit (its fingerprint differs from that of these weights and this "
                "config.json): it was made for another model of the same shape"
            )


@torch.no_grad()
def _layer_tensors(
    model: StreamedModel, tokens: torch.Tensor, observers: Observers, advance: Advance, known: Calibration | None
) -> Iterator[Tensors]:
    """Yield the tensors of the calibration file, one layer at a time; the statistics are those of `known`, if any."""
    hidden = model.embed(tokens)
    # Hidden states of converted models: one for each number of groups that is fitted, or one for fitted routers.
    fits = max(len(observers.fitted_counts(layer)) for layer in range(len(observers.layouts)))
    converted = [hidden.clone() for _ in range(max(fits, int("router" in observers.kinds)))]
    for layer, module in model.layers():
        attention: Any = model.attention(module)
        # Run the source: record statistics, and the attention outputs that the fits reproduce. A router needs neither.
        observed = observers.of_layer(layer) if known is None else {}
        fitted_counts = observers.fitted_counts(layer)
        calls = [AttentionCalls(module.input_layernorm, hidden, states) for states in converted if fitted_counts]  # type: ignore[arg-type]
        with ExitStack() as hooks:
            record = partial(_observe, observed.values())
            hooks.enter_context(attention.register_forward_pre_hook(record, with_kwargs=True))
            for call in calls:
                hooks.enter_context(attention.register_forward_hook(call, with_kwargs=True))
            if observers.kinds - {"router"}:
                _step(model, module, hidden)
        tensors = {kind: observer.sums for kind, observer in observed.items()}
        tensors |= {} if known is None else known.layer(layer)
        # Fit component heads, for each converted model with its own counts.
        compressed = [Tensors() for _ in converted]
        if fitted_counts:
            sums = {name: total.cpu() for name, total in tensors["statistics"].items()}
            statistics = HeadStatistics(observers.layouts[layer], sums)
            is_routed = observers.routing(layer) is not None
            compressed = [
                solve_layer(attention, statistics, *pair, is_routed) for pair in zip(calls, fitted_counts, strict=True)
            ]
            tensors["statistics"] = statistics.sums
        # Run the converted models, with a fitted router if the layer has one.
        heads = observers.layouts[layer].query_heads
        for states, changed in zip(converted, compressed, strict=True):
            with substituted(attention, changed):
                tensors["router"] = _route(model, module, states, observers.routing(layer), heads)
        yield {
            f"{layer}.{kind}.{name}": tensor.cpu()
            for kind, by_name in tensors.items()
            for name, tensor in by_name.items()
        }
        advance(layer + 1, len(observers.layouts))


def _step(model: StreamedModel, module: nn.Module, hidden: torch.Tensor) -> None:
    """Replace hidden states, in place, by a layer's outputs."""
    with fast_products():
        model.step(module, hidden)
    check_hidden(hidden)


def _route(model: StreamedModel, module: Any, hidden: torch.Tensor, routing: Routing | None, heads: int) -> Tensors:
    """Return a layer's router, fitted on the converted model; replace the hidden states by the layer's outputs."""
    if routing is None:
        _step(model, module, hidden)
        return {}
    attention = model.attention(module)
    with recorded(attention, hidden) as outputs:
        _step(model, module, hidden.clone())
    size = attention.o_proj.weight.shape[1] // heads
    fitted = fit_router(outputs, attention.o_proj.weight, routing, size)
    with routed(attention, fitted, routing, size):
        _step(model, module, hidden)
    return fitted


def _observe(observers: Iterable[Observer], attention: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention layer that passes its inputs to the observers."""
    with full_products():
        for observer in observers:
            observer.observe(attention, inputs["hidden_states"], inputs["position_embeddings"])


def observe(
    source: Source,
    stock: Any,
    text: Text,
    observers: Observers,
    cached: Path,
    progress: Progress,
    known: Calibration | None = None,
    device: str = "cpu",
) -> Calibration:
    """Return the given saved calibration, the one that an unfinished run left at `cached`, or a new one at `cached`.

    A new one has the statistics of `known`, or else runs the source on windows of tokens (B, T) or on images.
    """
    if text.path is not None and text.is_saved:
        calibration = Calibration(text.path)
        calibration.check(observers, lambda: fingerprint_of(source.store, stock, progress))
        return calibration
    if not cached.exists():
        model = stream(source.store, stock, device=device)
        tokens = text.tokens(source, model, cached.parent, progress)
        fingerprint = fingerprint_of(source.store, stock, progress)
        tensors = _layer_tensors(model, tokens, observers, partial(progress, "calibrating"), known)
        partial_file = cached.with_name(f"{cached.name}.partial")
        expected = observers.shapes() | observers.fitted_shapes()
        write_streamed(partial_file, expected, tensors, {FINGERPRINT: fingerprint})
        partial_file.replace(cached)
    return Calibration(cached)


IGNORED_FIELDS = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Config fields that do not affect a layer's outputs."""


def fingerprint_of(store: TensorStore, config: Any, progress: Progress) -> str:
    """Return a hash of the config and of every weight that a calibration depends on."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in IGNORED_FIELDS}
    lines = [json.dumps(fields, sort_keys=True, default=str)]
    names = sorted(name for name in tensor_shapes(config, store.entries) if name not in ("model.norm.weight", HEAD))
    read = Counter(progress, "checking", sum(store.entries[name].size for name in names))
    for name in names:
        entry = store.entries[name]
        lines.append(f"{name} {entry.dtype} {list(entry.shape)} {digest_of(store.chunks(name))}")
        read.add(entry.size)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
