"""Chooses component heads for each layer, within a budget for the KV cache, by measured loss.

Every layer, side (keys or values) and count is tried alone, as in figure 8 of the MEA paper, and all in one pass over
the model: the hidden states of each trial branch off at its layer. The loss of a trial is the KL divergence from the
source's predictions, which needs much less text than the loss on the text's tokens. Losses are assumed to add up over
layers.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd, inf
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance, Progress
from crosshead.modeling.mechanisms.base import HeadLayout

from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import Text
from ..options import MixerRequest
from ..sources.model_folder import write_json
from ..sources.resolve import Source
from ..sources.tensor_store import TensorStore
from .convert_layers import component_counts
from .head_groups import Counts
from .layer_rewrites import Tensors, read_attention, substituted
from .virtual_heads import PROJECTIONS, approximate

TRIAL_LENGTH, TRIALS = 256, 8
STRIDE = 2
"""Distance of the positions that are evaluated: logits are expensive, and neighbouring positions are similar."""
Trial = tuple[int, str, int]
"""Layer, side, component heads."""
Pair = tuple[int, int]
"""Component heads of a layer's keys and of its values."""
Losses = dict[Trial, float]
LossFunction = Callable[[int, torch.Tensor, torch.Tensor], float]
"""The loss of a trial on one window: index, the source's logits (T / STRIDE, vocabulary), and the trial's."""


def counts_to_try(heads: int, groups: int = 1) -> list[int]:
    """All smaller counts for up to 4 heads, else quarters; those that can be divided into groups."""
    counts = range(1, heads) if heads <= 4 else sorted({heads // 4, heads // 2, 3 * heads // 4})
    return [count for count in counts if count % groups == 0]


def divergence(window: int, expected: torch.Tensor, logits: torch.Tensor) -> float:
    """The KL divergence from the source's predictions."""
    before, after = functional.log_softmax(expected, dim=-1), functional.log_softmax(logits, dim=-1)
    return float(functional.kl_div(after, before, reduction="batchmean", log_target=True))


@torch.no_grad()
def measure_losses(
    model: StreamedModel,
    store: TensorStore,
    layouts: list[HeadLayout],
    kept: list[Counts],
    calibration: Calibration | None,
    method: str,
    tokens: torch.Tensor,
    advance: Advance,
    loss: LossFunction = divergence,
) -> Losses:
    """The loss of each trial, the mean over windows of tokens (B, T); `kept` are the counts of the other side."""
    hidden = model.embed(tokens)
    trials: dict[Trial, torch.Tensor] = {}
    for layer, module in model.layers():
        for states in trials.values():
            model.step(module, states)
        for side, count, tensors in _substitutes(store, layouts[layer], kept[layer], calibration, method):
            states = trials[layer, side, count] = hidden.clone()
            with substituted(module.self_attn, tensors):  # type: ignore[arg-type]
                model.step(module, states)
        model.step(module, hidden)
        advance(layer + 1, len(layouts))
    losses = dict.fromkeys(trials, 0.0)
    with model.head() as head:
        for window in range(len(tokens)):  # the logits of all windows together would be gigabytes
            expected = head(hidden[window, ::STRIDE])
            for trial, states in trials.items():
                losses[trial] += loss(window, expected, head(states[window, ::STRIDE])) / len(tokens)
    return losses


def _substitutes(
    store: TensorStore, layout: HeadLayout, kept: Counts, calibration: Calibration | None, method: str
) -> Iterator[tuple[str, int, Tensors]]:
    """For each side and count of a layer, the stock tensors that change so that it computes the same as compressed."""
    tensors = read_attention(store, layout.layer_index)
    statistics = None
    if calibration is not None:
        statistics = HeadStatistics(layout, calibration.layer(layout.layer_index)["statistics"])
    for count in counts_to_try(layout.key_value_heads, kept.groups):
        for side, counts in (("key", replace(kept, key=count)), ("value", replace(kept, value=count))):
            changed = approximate(tensors, statistics, layout, counts, method)
            yield side, count, {name: each for name, each in changed.items() if not each.equal(tensors[name])}


@dataclass(frozen=True)
class Choice:
    """Component heads for a budget."""

    pairs: list[Pair]
    """For each layer."""
    cache: float
    """The KV cache, as a part of the source's."""
    loss: float
    """The expected loss: the sum of the trials' losses."""


def choose(losses: Losses, layouts: list[HeadLayout], budget: float) -> Choice:
    """The component heads of each layer with the minimum total loss and a cache of at most `budget` of the source's.

    A knapsack problem: each layer has one pair of counts, whose price is the numbers that it caches per token.
    """
    size = layouts[0].head_dim
    side_data = layouts[0].key_value_heads if layouts[0].key_norm_eps is not None else 0
    unit = gcd(size, side_data)
    whole = sum(2 * layout.key_value_heads * size for layout in layouts)
    limit = int(budget * whole / unit)
    best: dict[int, tuple[float, tuple[Pair, ...]]] = {0: (0.0, ())}
    for layout in layouts:
        extended: dict[int, tuple[float, tuple[Pair, ...]]] = {}
        options = _options(losses, layout, side_data)
        for (price, (loss, counts)), (added_price, added_loss, added) in product(best.items(), options):
            total = price + added_price // unit
            if total <= limit and loss + added_loss < extended.get(total, (inf,))[0]:
                extended[total] = (loss + added_loss, (*counts, added))
        best = extended
    if not best:
        raise ConversionError(
            f"--budget {budget} is too small: the fewest component heads for each side and layer need more"
        )
    price, (loss, pairs) = min(best.items(), key=lambda item: item[1])
    return Choice(list(pairs), price * unit / whole, loss)


def _options(losses: Losses, layout: HeadLayout, side_data: int) -> list[tuple[int, float, Pair]]:
    """Cached numbers per token, loss, and counts, for each pair of counts that a layer may have."""
    heads, layer = layout.key_value_heads, layout.layer_index
    of_side = {
        side: {heads: 0.0} | {trial[2]: loss for trial, loss in losses.items() if trial[:2] == (layer, side)}
        for side in PROJECTIONS
    }
    options = []
    for (key, key_loss), (value, value_loss) in product(of_side["key"].items(), of_side["value"].items()):
        extra = side_data if min(key, value) < heads else 0
        options.append(((key + value) * layout.head_dim + extra, key_loss + value_loss, (key, value)))
    return options


def by_layer(losses: Losses) -> dict[str, Any]:
    """Losses as nested objects: layer, side, count."""
    table: dict[str, Any] = {}
    for (layer, side, count), loss in losses.items():
        table.setdefault(str(layer), {}).setdefault(side, {})[str(count)] = round(loss, 6)
    return table


CHOSEN = ("key_heads", "value_heads", "layers", "on")
"""Options of `explicit` that `--layers auto` chooses."""


@dataclass(frozen=True)
class AutoLayers:
    """The option `--layers auto`: chooses component heads on a text."""

    budget: float
    source: Source
    stock: Any
    """The source's configuration."""
    target: Any
    """The target's configuration, with all heads."""
    request: MixerRequest
    text: Text
    device: str

    def check(self) -> None:
        """`ConversionError` without `explicit`, or if the request sets an option that is to be chosen."""
        explicit = self.request.mixers.get("explicit")
        if explicit is None:
            raise ConversionError("--layers auto chooses component heads of 'explicit': add --mixer explicit")
        for option in CHOSEN:
            if option in explicit:
                raise ConversionError(f"--layers auto chooses mixers.explicit.{option}: omit one of the two")

    def resolve(
        self, calibration: Calibration | None, cached: Path, progress: Progress
    ) -> tuple[MixerRequest, dict[str, Any]]:
        """The request with component heads and layers, and the measured losses (cached by an earlier run)."""
        if not cached.exists():
            write_json(cached, self._measure(calibration, progress))
        chosen = json.loads(cached.read_bytes())
        counts = {side: chosen[side] for side in ("key_heads", "value_heads")}
        pairs = zip(*counts.values(), strict=True)
        layers = [layer for layer, pair in enumerate(pairs) if min(pair) < self.stock.num_key_value_heads]
        explicit = self.request.mixers["explicit"] | counts | {"layers": layers}
        return replace(self.request, mixers=self.request.mixers | {"explicit": explicit}), chosen

    def _measure(self, calibration: Calibration | None, progress: Progress) -> dict[str, Any]:
        tokens = self.text.windows(self.source, TRIAL_LENGTH, TRIALS, self.stock.vocab_size)
        layouts = self.target.layouts()
        losses = measure_losses(
            StreamedModel(self.source.store, self.stock, device=self.device),
            self.source.store,
            layouts,
            component_counts(self.target, self.request),
            calibration,
            self.request.choices["explicit"]["method"],
            tokens,
            partial(progress, "choosing"),
        )
        choice = choose(losses, layouts, self.budget)
        key_heads, value_heads = zip(*choice.pairs, strict=True)
        chosen = {"losses": by_layer(losses), "key_heads": key_heads, "value_heads": value_heads}
        expected = {"cache": round(choice.cache, 6), "expected_divergence": round(choice.loss, 6)}
        return self.text.of_windows() | chosen | expected
