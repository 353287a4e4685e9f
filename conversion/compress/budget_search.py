"""Which layers get by with fewer component heads: the loss of each choice is measured, a budget then picks among them.

Every layer, side and count is tried alone, as in figure 8 of the MEA paper, and all in one pass over the model: each
trial leaves the common path at its layer and goes on beside it. The loss of a trial is against the source's own
predictions (a KL divergence), which tells small harm from chance on far less text than the loss against the text.
Harm is taken to add up over layers.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress
from crosshead.modeling.mechanisms.base import HeadLayout

from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import Text
from ..options import MixerRequest
from ..sources.model_folder import write_json
from ..sources.resolve import Source
from ..sources.tensor_store import TensorStore
from .layer_rewrites import Tensors, read_attention, substituted
from .virtual_heads import PROJECTIONS, approximate

TRIAL_LENGTH, TRIALS = 256, 8
STRIDE = 2
"""Every so many positions are judged: neighbours say much the same, and logits are dear."""
Trial = tuple[int, str, int]
"""Layer, side, component heads."""
Losses = dict[Trial, float]
Judge = Callable[[int, torch.Tensor, torch.Tensor], float]
"""The loss of a trial on one window: its index, the source's logits (T / STRIDE, vocabulary), and the trial's."""


@dataclass(frozen=True)
class Choice:
    """Component heads of every layer."""

    key_heads: list[int]
    value_heads: list[int]

    def layers(self, heads: int) -> list[int]:
        """The layers with fewer components than heads."""
        pairs = enumerate(zip(self.key_heads, self.value_heads, strict=True))
        return [layer for layer, pair in pairs if min(pair) < heads]


def counts_to_try(heads: int) -> list[int]:
    """Every smaller count of few heads; quarters of many."""
    return list(range(1, heads)) if heads <= 4 else sorted({heads // 4, heads // 2, 3 * heads // 4})


def divergence(window: int, expected: torch.Tensor, logits: torch.Tensor) -> float:
    """The KL divergence from the source's predictions."""
    before, found = functional.log_softmax(expected, dim=-1), functional.log_softmax(logits, dim=-1)
    return float((before.exp() * (before - found)).sum(-1).mean())


@torch.no_grad()
def measure_losses(
    model: StreamedModel,
    store: TensorStore,
    layouts: list[HeadLayout],
    calibration: Calibration | None,
    method: str,
    tokens: torch.Tensor,
    advance: Callable[[int, int], None],
    judge: Judge = divergence,
) -> Losses:
    """The loss of each trial, the mean over windows of tokens (B, T)."""
    hidden = model.embed(tokens)
    trials: dict[Trial, torch.Tensor] = {}
    for layer, module in model.layers():
        for states in trials.values():
            model.step(module, states)
        for side, count, tensors in _substitutes(store, layouts[layer], calibration, method):
            states = trials[layer, side, count] = hidden.clone()
            with substituted(module.self_attn, tensors):  # type: ignore[arg-type]
                model.step(module, states)
        model.step(module, hidden)
        advance(layer + 1, len(layouts))
    losses = dict.fromkeys(trials, 0.0)
    with model.head() as head:
        for window in range(len(tokens)):  # the logits of all windows at once would be gigabytes
            expected = head(hidden[window, ::STRIDE])
            for trial, states in trials.items():
                losses[trial] += judge(window, expected, head(states[window, ::STRIDE])) / len(tokens)
    return losses


def _substitutes(
    store: TensorStore, layout: HeadLayout, calibration: Calibration | None, method: str
) -> Iterator[tuple[str, int, Tensors]]:
    """For each side and count of a layer, projections with which the stock layer acts as if compressed."""
    tensors = read_attention(store, layout.layer_index)
    statistics = None
    if calibration is not None:
        statistics = HeadStatistics.from_tensors(calibration.observed(layout.layer_index)["statistics"], layout)
    heads = layout.key_value_heads
    for side, count in product(PROJECTIONS, counts_to_try(heads)):
        counts = {"key": heads, "value": heads, side: count}
        changed = approximate(tensors, statistics, layout, counts["key"], counts["value"], method)
        yield side, count, {name: changed[name] for name in changed if name.startswith(PROJECTIONS[side])}


def choose(losses: Losses, layouts: list[HeadLayout], budget: float) -> Choice:
    """The component heads with the least summed loss whose cache is at most `budget` of the source's.

    A knapsack: each layer takes one pair of counts, at its price in cached numbers.
    """
    size = layouts[0].head_dim
    beside = layouts[0].key_value_heads if layouts[0].key_norm_eps is not None else 0
    unit = gcd(size, beside)
    room = int(budget * sum(2 * layout.key_value_heads * size for layout in layouts) / unit)
    best: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {0: (0.0, ())}
    for layout in layouts:
        following: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {}
        options = _options(losses, layout, beside)
        for (spent, (loss, pairs)), (price, rise, pair) in product(best.items(), options):
            total = spent + price // unit
            if total <= room and loss + rise < following.get(total, (inf,))[0]:
                following[total] = (loss + rise, (*pairs, pair))
        best = following
    if not best:
        raise ConversionError(f"--budget {budget} is too small: one component head for each side and layer needs more")
    _, pairs = min(best.values())
    return Choice([key for key, _ in pairs], [value for _, value in pairs])


def _options(losses: Losses, layout: HeadLayout, beside: int) -> list[tuple[int, float, tuple[int, int]]]:
    """Price in numbers per token, loss, and the pair of counts, for each pair a layer may have."""
    heads, layer = layout.key_value_heads, layout.layer_index
    counts = counts_to_try(heads)
    rises = {side: {heads: 0.0} | {count: losses[layer, side, count] for count in counts} for side in PROJECTIONS}
    found = []
    for (key, key_rise), (value, value_rise) in product(rises["key"].items(), rises["value"].items()):
        extra = beside if min(key, value) < heads else 0
        found.append(((key + value) * layout.head_dim + extra, key_rise + value_rise, (key, value)))
    return found


def by_layer(losses: Losses) -> dict[str, Any]:
    """Losses as nested objects: layer, side, count."""
    table: dict[str, Any] = {}
    for (layer, side, count), loss in losses.items():
        table.setdefault(str(layer), {}).setdefault(side, {})[str(count)] = round(loss, 6)
    return table


def describe(losses: Losses, choice: Choice) -> dict[str, Any]:
    """For the record: what was measured, by layer, side and count."""
    return {"losses": by_layer(losses), "key_heads": choice.key_heads, "value_heads": choice.value_heads}


CHOSEN = ("key_heads", "value_heads", "layers", "on")
"""Options of `explicit` that are not asked for but chosen."""


@dataclass(frozen=True)
class AutoLayers:
    """What is to be chosen, of what, and on which text."""

    budget: float
    source: Source
    stock: Any
    """The source's configuration."""
    target: Any
    """The configuration of the result, before anything is chosen."""
    request: MixerRequest
    text: Text

    def check(self) -> None:
        """`ConversionError` where there is nothing to choose, or somebody has chosen already."""
        explicit = self.request.mixers.get("explicit")
        if explicit is None:
            raise ConversionError("--layers auto chooses component heads of 'explicit': add --mixer explicit")
        for option in CHOSEN:
            if option in explicit:
                raise ConversionError(f"--layers auto chooses mixers.explicit.{option}: leave one of the two out")

    def resolve(
        self, calibration: Calibration | None, kept: Path, progress: Progress
    ) -> tuple[MixerRequest, dict[str, Any]]:
        """The request with counts and layers, and what was measured: now, or by a run before this, which kept it."""
        if not kept.exists():
            write_json(kept, self._measured(calibration, progress))
        found = json.loads(kept.read_bytes())
        counts = {side: found[side] for side in ("key_heads", "value_heads")}
        layers = {"layers": Choice(**counts).layers(self.stock.num_key_value_heads)}
        mixers = self.request.mixers | {"explicit": self.request.mixers["explicit"] | counts | layers}
        return replace(self.request, mixers=mixers), found

    def _measured(self, calibration: Calibration | None, progress: Progress) -> dict[str, Any]:
        tokens = self.text.windows(self.source, TRIAL_LENGTH, TRIALS, self.stock.vocab_size)
        losses = measure_losses(
            StreamedModel(self.source.store, self.stock),
            self.source.store,
            self.target.layouts(),
            calibration,
            self.request.choices["explicit"]["method"],
            tokens,
            lambda *done: progress("choosing", *done),
        )
        read = {"text": self.text.read_as, "sha256": self.text.digest_read()}
        return read | describe(losses, choose(losses, self.target.layouts(), self.budget))
