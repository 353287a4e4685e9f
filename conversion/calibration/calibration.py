"""Statistics of attention heads, recorded layer by layer while the source runs on a text, in one file."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress
from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.families import Shapes, stock_shapes
from ..compress.fitted_output import AttentionCalls, output_change
from ..compress.layer_rewrites import Tensors
from ..compress.reorder_heads import HeadUse
from ..compress.virtual_heads import approximate, output_name, shapes_of_solved, solved
from ..plan import HEAD
from ..sources.resolve import Source
from ..sources.tensor_store import TensorStore
from ..writing.shard_writer import digest_of, write_growing
from .head_statistics import KINDS, PARTS, HeadStatistics, fast_products, full_products
from .streamed_model import StreamedModel
from .text import Text

FINGERPRINT = "fingerprint"
Advance = Callable[[int, int], None]
"""Called with the layers done and the layers there are."""


@dataclass(frozen=True)
class Observers:
    """Who watches each layer."""

    wanted: set[str]
    """Any of "statistics" (for component heads) and "use" (for the order of heads)."""
    layouts: list[HeadLayout]
    active: list[int]
    """How many heads of each layer are to be active."""
    biased: bool
    """Keys and values have biases."""
    components: list[tuple[int, int]] = field(default_factory=list)
    """Component heads of keys and values in each layer, to solve for while the text is at hand; empty where they are
    not known yet."""

    def of_layer(self, layer: int) -> dict[str, HeadStatistics | HeadUse]:
        """New observers, by kind."""
        layout = self.layouts[layer]
        made: dict[str, Callable[[], HeadStatistics | HeadUse]] = {
            "statistics": lambda: HeadStatistics(layout),
            "use": lambda: HeadUse(layout.query_heads, self.active[layer]),
        }
        return {kind: made[kind]() for kind in sorted(self.wanted)}

    def solves(self, layer: int) -> bool:
        """There is something to solve for."""
        heads = self.layouts[layer].key_value_heads
        return "statistics" in self.wanted and bool(self.components) and min(self.components[layer]) < heads

    def shapes(self) -> Shapes:
        """The names and shapes of the tensors that a file of observations holds."""
        found: Shapes = {}
        for layer, layout in enumerate(self.layouts):
            for kind in self.wanted:
                shapes = SHAPES[kind](layout, self.biased)
                found |= {f"{layer}.{kind}.{name}": shape for name, shape in shapes.items()}
        return found

    @property
    def size(self) -> int:
        """Bytes of that file, at most."""
        return sum(8 * prod(shape) for shape in (self.shapes() | self.solved_shapes()).values())

    def solved_shapes(self) -> Shapes:
        """The same of what it may hold beside them."""
        found: Shapes = {}
        for layer, layout in enumerate(self.layouts):
            if self.solves(layer):
                shapes = shapes_of_solved(layout, *self.components[layer], self.biased)
                found |= {f"{layer}.statistics.{name}": shape for name, shape in shapes.items()}
        return found


def _statistics_shapes(layout: HeadLayout, biased: bool) -> Shapes:
    heads, size = layout.key_value_heads, layout.head_dim
    features = heads * size + biased
    tails = {"metric": (size, size), "gram": (features, features), "weight": ()}
    return {f"{side}.{kind}": (heads, parts, *tails[kind]) for side, parts in PARTS.items() for kind in KINDS}


def _use_shapes(layout: HeadLayout, biased: bool) -> Shapes:
    return {"counts": (layout.query_heads,)}


SHAPES: dict[str, Callable[[HeadLayout, bool], Shapes]] = {"statistics": _statistics_shapes, "use": _use_shapes}
"""What is observed of a layer -> the tensors that it takes."""


@dataclass(frozen=True)
class Calibration:
    """A file of observations, read one layer at a time."""

    path: Path

    def observed(self, layer: int) -> dict[str, Tensors]:
        """What was observed in a layer: "statistics", "use" -> tensors."""
        found: dict[str, Tensors] = {}
        with safe_open(self.path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                index, kind, part = name.split(".", 2)
                if int(index) == layer:
                    found.setdefault(kind, {})[part] = file.get_tensor(name)
        return found

    def check(self, observers: Observers, fingerprint: Callable[[], str] | None = None) -> None:
        """`ConversionError` where the file is something else, or was made for something else.

        `fingerprint` gives the model's, and is called last, because it takes time.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                made_for = (file.metadata() or {}).get(FINGERPRINT)
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConversionError(f"--calibration {self.path} cannot be read as a calibration: {error}") from None
        there = {name: shape for name, shape in observers.solved_shapes().items() if name in found}
        for name, shape in (observers.shapes() | there).items():
            if found.get(name) != shape:
                raise ConversionError(
                    f"--calibration {self.path} does not fit ({name} is {found.get(name, 'not there')}, and should be "
                    f"{shape}): it was made for another model or another conversion"
                )
        if fingerprint is None:
            return
        if not made_for:
            raise ConversionError(
                f"--calibration {self.path} does not say which weights it was made for, as those of earlier versions "
                "do not: calibrate again on the text, with --save-calibration"
            )
        if made_for != fingerprint():
            raise ConversionError(
                f"--calibration {self.path} does not fit (its fingerprint is not that of these weights and this "
                "config.json): it was made for another model of the same shape"
            )


@torch.no_grad()
def calibrate(
    model: StreamedModel, tokens: torch.Tensor, observers: Observers, path: Path, advance: Advance, fingerprint: str
) -> None:
    """Run windows of tokens (B, T) through the source and write what was observed; `fingerprint` is the model's."""
    partial = path.with_name(f"{path.name}.partial")
    expected = observers.shapes() | observers.solved_shapes()
    write_growing(partial, expected, _observed(model, tokens, observers, advance), {FINGERPRINT: fingerprint})
    partial.replace(path)


def _observed(model: StreamedModel, tokens: torch.Tensor, observers: Observers, advance: Advance) -> Iterator[Tensors]:
    """What the observers of each layer, who see its attention's input, have found: a layer at a time."""
    hidden = model.embed(tokens)
    for layer, module in model.layers():
        kinds = observers.of_layer(layer)

        def observe(attention: nn.Module, args: Any, inputs: dict[str, Any], kinds: Any = kinds) -> None:
            with full_products():
                for observer in kinds.values():
                    observer.observe(attention, inputs["hidden_states"], inputs["position_embeddings"])

        attention: Any = module.self_attn
        handles, calls = [attention.register_forward_pre_hook(observe, with_kwargs=True)], AttentionCalls(len(hidden))
        if observers.solves(layer):
            handles.append(attention.register_forward_hook(calls, with_kwargs=True))
        for window in hidden.split(1):
            with fast_products():
                window.copy_(model.call(module, window))
        for handle in handles:
            handle.remove()
        statistics = kinds.get("statistics")
        if isinstance(statistics, HeadStatistics) and observers.solves(layer):
            _solve(attention, statistics, calls, observers.components[layer])
        tensors = {(kind, name): value for kind in kinds for name, value in kinds[kind].as_tensors().items()}
        yield {f"{layer}.{kind}.{name}": value for (kind, name), value in tensors.items()}
        advance(layer + 1, len(observers.layouts))


def _solve(
    attention: nn.Module, statistics: HeadStatistics, calls: AttentionCalls, components: tuple[int, int]
) -> None:
    """Add to the statistics what a conversion to so many components would have to find out from them, and more."""
    layout, tensors = statistics.layout, dict(attention.state_dict())
    statistics.sums |= solved(statistics, layout, *components)
    compressed = approximate(tensors, statistics, layout, *components, "aligned")
    changed = {name: compressed[name] for name in compressed if not compressed[name].equal(tensors[name])}
    statistics.sums[output_name(*components)] = output_change(attention, calls, changed)


def observe(
    source: Source, stock: Any, text: Text, observers: Observers, cached: Path, progress: Progress
) -> Calibration:
    """The saved calibration, the one that an unfinished run left in `cached`, or a new one there."""
    if text.given is not None and text.is_saved:
        calibration = Calibration(text.given)
        calibration.check(observers, lambda: fingerprint_of(source.store, stock, progress))
        return calibration
    if not cached.exists():
        model = StreamedModel(source.store, stock)
        tokens = text.to_calibrate_on(source, model, progress)
        fingerprint = fingerprint_of(source.store, stock, progress)
        calibrate(model, tokens, observers, cached, partial(progress, "calibrating"), fingerprint)
    return Calibration(cached)


NOT_RUN = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Fields of a configuration that no layer computes with."""


def fingerprint_of(store: TensorStore, config: Any, progress: Progress) -> str:
    """One hash of what a calibration depends on: the configuration, and every weight that the layers read."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_RUN}
    lines = [json.dumps(fields, sort_keys=True, default=str)]
    run = sorted(name for name in stock_shapes(config) if name not in ("model.norm.weight", HEAD))
    total, done = sum(store.entries[name].size for name in run), 0
    for name in run:
        entry = store.entries[name]
        lines.append(f"{name} {entry.dtype} {list(entry.shape)} {digest_of(store.chunks(name))}")
        done += entry.size
        progress("checking", done, total)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
