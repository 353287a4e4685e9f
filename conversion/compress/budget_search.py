"""Budget search: chooses the number of component heads or active heads per layer, by measured loss.

A trial reduces the heads of one side (keys, values, or the active heads of a mixture) of one layer, as in figure 8 of
the MEA paper. All trials run in one pass over the model: the hidden states of a trial branch off at its layer. The
loss of a trial is the KL divergence from the source's predictions, which needs much less text than the cross entropy.
For active heads, one trial per layer is measured, because the divergence is nearly proportional to the mean square of
the change of the layer's output. Losses are assumed to add up over layers, so that the choice is a knapsack problem.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, gcd, inf
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Advance
from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.attention_names import attention_names
from ..calibration.calibration import Calibration
from ..calibration.head_statistics import HeadStatistics
from ..calibration.streamed_model import StreamedModel, check_hidden
from ..sources.tensor_store import TensorStore
from .component_heads import ComponentHeads
from .fitted_router import Routing, fit_output, fit_scores, recorded, routed
from .head_groups import Counts
from .layer_rewrites import PROJECTIONS, read_attention, substituted

STRIDE = 2
"""Losses are measured at every second position: logits are expensive, and neighbouring positions are similar."""
TRIAL_DOCUMENTATION = 0.5
"""Fraction of documentation in the default windows of trials; more than in calibration gives better choices."""
CALL_TOKENS = 1024
"""Number of tokens per call of a layer: one short window would not keep a GPU busy."""
FIT_TOKENS = 8 * 1024
"""Number of tokens of the calibration text on which the routers of trials are fitted."""
ACTIVE = "active"
"""Side of a trial with fewer active heads; the other sides are the keys of `PROJECTIONS`."""
Trial = tuple[int, str, int]
"""(Layer, side, number of heads)."""
LayerTrial = tuple[str, int, AbstractContextManager[None]]
"""(Side, number of heads, context in which the layer's module has this number of heads)."""
Losses = dict[Trial, float]
"""Trial -> mean loss over windows."""


def counts_to_try(heads: int, groups: int = 1) -> list[int]:
    """Return the component counts to try: all smaller ones for up to 4 heads, else quarters; multiples of `groups`."""
    counts = range(1, heads) if heads <= 4 else sorted({heads // 4, heads // 2, 3 * heads // 4})
    return [count for count in counts if count % groups == 0]


def active_to_try(heads: int) -> list[int]:
    """Return the numbers of active heads to try: all smaller ones for up to 4 heads, else sixths."""
    return list(range(1, heads)) if heads <= 4 else sorted({round(heads * part / 6) for part in range(1, 6)})


def divergence(window: int, expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Return the KL divergence of a trial's predictions from the source's (`expected`), the mean over positions."""
    before, after = functional.log_softmax(expected, dim=-1), functional.log_softmax(logits, dim=-1)
    return float(functional.kl_div(after, before, reduction="batchmean", log_target=True))


@dataclass(frozen=True)
class ComponentTrials:
    """Trials with fewer component heads for keys or values; the other side has its counts in `unchanged`."""

    is_scaled = False
    store: TensorStore
    config: Any
    layouts: list[HeadLayout]
    unchanged: list[Counts]
    """Component counts of each layer before the trials."""
    calibration: Calibration | None
    method: str

    def of_layer(self, layer: int, module: Any) -> Iterator[LayerTrial]:
        """Yield a trial for every side and component count of a layer."""
        layout, unchanged, statistics = self.layouts[layer], self.unchanged[layer], None
        tensors = read_attention(self.store, attention_names(self.config, layer))
        if self.calibration is not None:
            statistics = HeadStatistics(layout, self.calibration.layer(layer)["statistics"])
        for count in counts_to_try(layout.key_value_heads, unchanged.groups):
            for side in PROJECTIONS:
                counts = replace(unchanged, key=count) if side == "key" else replace(unchanged, value=count)
                changed = ComponentHeads(layout, counts, self.method).approximate(tensors, statistics)
                changed = {name: tensor for name, tensor in changed.items() if not tensor.equal(tensors[name])}
                yield side, count, substituted(module.self_attn, changed)


class ActiveTrials:
    """Trials with fewer active heads; routers are fitted on the source's outputs for windows of tokens (B, T)."""

    is_scaled = True

    def __init__(self, model: StreamedModel, tokens: torch.Tensor) -> None:
        self.model = model
        self.hidden = model.embed(tokens[:: -(-tokens.numel() // FIT_TOKENS)])

    def of_layer(self, layer: int, module: Any) -> Iterator[LayerTrial]:
        """Yield a trial for every number of active heads of a layer."""
        attention = self.model.attention(module)
        with recorded(attention, self.hidden) as outputs:
            self.model.step(module, self.hidden)
        weight = attention.o_proj.weight
        size = weight.shape[1] // self.model.config.num_attention_heads
        scores = fit_scores(outputs, weight, 0, size)
        for count in active_to_try(len(scores)):
            routing = Routing(0, count)
            fitted = fit_output(outputs, weight, routing, scores, size)
            yield ACTIVE, count, routed(attention, fitted, routing, size)


@torch.no_grad()
def measure_losses(
    model: StreamedModel,
    trials: Sequence[ComponentTrials | ActiveTrials],
    tokens: torch.Tensor,
    advance: Advance,
    loss: Callable[[int, torch.Tensor, torch.Tensor], float] = divergence,
) -> Losses:
    """Return the loss of each trial, averaged over windows of tokens (B, T).

    `loss` is a function of window index, source logits and trial logits, both (T / STRIDE, vocabulary). If trials are
    scaled, the middle number of heads is measured in each layer. The losses of the others are in proportion to the
    mean square of the change of the layer's output.
    """
    hidden, batch_size = model.embed(tokens), max(1, CALL_TOKENS // tokens.shape[1])
    trial_states: dict[Trial, torch.Tensor] = {}
    scales: dict[Trial, tuple[Trial, float]] = {}
    for layer, module in model.layers():
        for states in trial_states.values():
            model.step(module, states, batch_size)
        outputs = hidden.clone()
        model.step(module, outputs, batch_size)
        check_hidden(outputs)
        for kind in trials:
            layer_states: dict[Trial, torch.Tensor] = {}
            for side, count, context in kind.of_layer(layer, module):
                states = layer_states[layer, side, count] = hidden.clone()
                with context:
                    model.step(module, states, batch_size)
            if kind.is_scaled:
                changes = {trial: float((states - outputs).square().mean()) for trial, states in layer_states.items()}
                middle = sorted(changes)[len(changes) // 2]
                scales |= {trial: (middle, change / (changes[middle] or 1.0)) for trial, change in changes.items()}
                layer_states = {middle: layer_states[middle]}
            trial_states |= layer_states
        hidden = outputs
        advance(layer + 1, model.config.num_hidden_layers)
    losses = dict.fromkeys(trial_states, 0.0)
    with model.head() as head:
        for window in range(len(tokens)):  # the logits of all windows together would be gigabytes
            expected = head(hidden[window, ::STRIDE])
            for trial, states in trial_states.items():
                losses[trial] += loss(window, expected, head(states[window, ::STRIDE])) / len(tokens)
    losses |= {trial: losses[middle] * scale for trial, (middle, scale) in scales.items()}
    return dict(sorted(losses.items()))


@dataclass(frozen=True)
class Choice:
    """Numbers of heads chosen for a budget."""

    heads: dict[str, tuple[int, ...]]
    """Option of a mechanism ("key_heads" and "value_heads", or "active_heads") -> number of heads per layer."""
    fraction: float
    """Used part of the budget: the size of the KV cache, or the active heads, as a fraction of the source's."""
    loss: float
    """Expected loss: the sum of the losses of the chosen trials."""


def choose(losses: Losses, layouts: list[HeadLayout], budget: float, dtype: torch.dtype | None = None) -> Choice:
    """Return the component heads per layer with the minimum total loss; `budget` is a fraction of the source's cache.

    `dtype` is the dtype of the cache. Combinations of normalised keys also cache a scale per head, which takes two
    numbers in half precision.
    """
    size, numbers = layouts[0].head_dim, 2 if dtype in (torch.float16, torch.bfloat16) else 1
    side_data = numbers * layouts[0].key_value_heads if layouts[0].key_norm_eps is not None else 0
    unit = gcd(size, side_data)
    source_cache = sum(2 * layout.key_value_heads * size for layout in layouts)
    options = [_options(losses, layout, side_data) for layout in layouts]
    priced = [[(price // unit, loss, pair) for price, loss, pair in layer_options] for layer_options in options]
    price, loss, pairs = _cheapest(priced, budget, source_cache // unit, "--cache")
    key_heads, value_heads = zip(*pairs, strict=True)
    return Choice({"key_heads": key_heads, "value_heads": value_heads}, price * unit / source_cache, loss)


def choose_active(losses: Losses, layouts: list[HeadLayout], budget: float) -> Choice:
    """Return active heads per layer with the minimum total loss; `budget` is a fraction of all heads."""
    heads = layouts[0].query_heads
    tables = [_side_losses(losses, layout.layer_index, ACTIVE, heads) for layout in layouts]
    options = [[(count, loss, count) for count, loss in side_losses.items()] for side_losses in tables]
    all_heads = heads * len(layouts)
    price, loss, counts = _cheapest(options, budget, all_heads, "--active")
    return Choice({"active_heads": counts}, price / all_heads, loss)


def _cheapest(
    options: list[list[tuple[int, float, Any]]], budget: float, full_price: int, name: str
) -> tuple[int, float, tuple[Any, ...]]:
    """Return total price, total loss and picks of the best options, one per layer; a knapsack problem.

    An option is (price, loss, pick). The total price is at most `budget * full_price`, the total loss is minimal.
    `name` is the command-line option that sets the budget, for the error message.
    """
    minimum = sum(min(price for price, _, _ in layer_options) for layer_options in options)
    limit = int(round(budget * full_price, 6))  # without the rounding, 0.7 of 180 would be 125
    if minimum > limit:
        raise ConversionError(
            f"{name} {budget * 100:.4g}% is too small: the fewest heads that can be chosen for this model need "
            f"{ceil(1000 * minimum / full_price) / 10:g}%"
        )
    best: dict[int, tuple[float, tuple[Any, ...]]] = {0: (0.0, ())}
    for layer_options in options:
        extended: dict[int, tuple[float, tuple[Any, ...]]] = {}
        for (price, (loss, picks)), (added_price, added_loss, added) in product(best.items(), layer_options):
            total = price + added_price
            if total <= limit and loss + added_loss < extended.get(total, (inf,))[0]:
                extended[total] = (loss + added_loss, (*picks, added))
        best = extended
    price, (loss, picks) = min(best.items(), key=lambda item: item[1])
    return price, loss, picks


def _options(losses: Losses, layout: HeadLayout, side_data: int) -> list[tuple[int, float, tuple[int, int]]]:
    """Return (cached numbers per token, loss, component counts) for each pair of counts that a layer may have."""
    heads, options = layout.key_value_heads, []
    sides = (_side_losses(losses, layout.layer_index, side, heads).items() for side in ("key", "value"))
    for (key, key_loss), (value, value_loss) in product(*sides):
        extra = side_data if min(key, value) < heads else 0
        options.append(((key + value) * layout.head_dim + extra, key_loss + value_loss, (key, value)))
    return options


def _side_losses(losses: Losses, layer: int, side: str, heads: int) -> dict[int, float]:
    """Return number of heads -> loss for a side of a layer; all `heads` have no loss."""
    return {heads: 0.0} | {trial[2]: loss for trial, loss in losses.items() if trial[:2] == (layer, side)}


def by_layer(losses: Losses) -> dict[str, Any]:
    """Return losses as nested dicts: layer -> side -> count -> rounded loss."""
    table: dict[str, Any] = {}
    for (layer, side, count), loss in losses.items():
        table.setdefault(str(layer), {}).setdefault(side, {})[str(count)] = round(loss, 6)
    return table
