"""`--layers auto`, `--cache` and `--active`: choice of the number of heads per layer, by measured loss."""

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress
from crosshead.modeling.mechanisms.base import HeadLayout

from ..calibration.calibration import Calibration
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import Text, within_context
from ..mixers import MixerRequest
from ..sources.model_folder import write_json
from ..sources.resolve import Source
from ..sources.tensor_store import stored_dtype
from .budget_search import (
    ACTIVE,
    TRIAL_DOCUMENTATION,
    ActiveTrials,
    ComponentTrials,
    Losses,
    Trial,
    active_to_try,
    by_layer,
    choose,
    choose_active,
    counts_to_try,
    measure_losses,
)
from .convert_layers import layer_requests
from .head_groups import Counts
from .layer_rewrites import PROJECTIONS

TRIAL_LENGTH, TRIALS = 256, 16
"""Length in tokens and number of the windows on which losses are measured."""
CHOSEN = {
    "explicit": ("key_heads", "value_heads", "layers", "on"),
    "mixture": ("active_heads", "shared_heads", "layers"),
}
"""Mechanism -> options that the budget search sets; a request must not set them, except `shared_heads` to 0."""


@dataclass(frozen=True)
class AutoLayers:
    """Budget search for component heads (`explicit`) and active heads (`mixture`), by losses on a text."""

    cache: float | None
    """Budget for the KV cache as a fraction of the source's; None if component heads are not chosen."""
    active: float | None
    """Budget for active heads as a fraction of all heads; None if they are not chosen."""
    source: Source
    stock: Any
    """The source's config."""
    target: Any
    """The target's config before the choice, with all heads."""
    request: MixerRequest
    text: Text
    device: str

    def check(self) -> None:
        """Raise `ConversionError` if a budget is too small for this model, before anything is measured."""
        layouts, trials = self.target.layouts(), list[Trial]()
        if self.cache is not None:
            for (layout, unchanged), side in product(zip(layouts, self._unchanged(), strict=True), PROJECTIONS):
                counts = counts_to_try(layout.key_value_heads, unchanged.groups)
                trials += [(layout.layer_index, side, count) for count in counts]
        if self.active is not None:
            for layout in layouts:
                trials += [(layout.layer_index, ACTIVE, count) for count in active_to_try(layout.query_heads)]
        self._choices(dict.fromkeys(trials, 0.0), layouts)

    def resolve(
        self, calibration: Calibration | None, folder: Path, progress: Progress
    ) -> tuple[MixerRequest, dict[str, Any]]:
        """Return the request with the chosen heads and layers, and the choices with the measured losses.

        Losses that an earlier run saved in `folder` are reused.
        """
        cached = folder / "chosen.json"
        if not cached.exists():
            write_json(cached, self._measure(calibration, folder, progress))
        chosen = json.loads(cached.read_bytes())
        mixers, layers = dict(self.request.mixers), range(self.stock.num_hidden_layers)
        if self.cache is not None:
            counts = {side: chosen[side] for side in ("key_heads", "value_heads")}
            heads = self.stock.num_key_value_heads
            fewer = [layer for layer in layers if min(side_counts[layer] for side_counts in counts.values()) < heads]
            mixers["explicit"] = mixers["explicit"] | counts | {"layers": fewer}
        if self.active is not None:
            active = chosen["active_heads"]
            fewer = [layer for layer in layers if active[layer] < self.stock.num_attention_heads]
            mixers["mixture"] = mixers["mixture"] | {"active_heads": active, "layers": fewer}
        return replace(self.request, mixers=mixers), chosen

    def _measure(self, calibration: Calibration | None, folder: Path, progress: Progress) -> dict[str, Any]:
        """Measure the losses of all trials and return the choices with these losses."""
        count, length = within_context(self.stock, TRIALS, TRIAL_LENGTH)
        tokens = self.text.windows(
            self.source, length, count, self.stock.vocab_size, documentation=TRIAL_DOCUMENTATION
        )
        layouts = self.target.layouts()
        model = StreamedModel(self.source.store, self.stock, device=self.device)
        trials = list[ComponentTrials | ActiveTrials]()
        if self.cache is not None:
            method = self.request.choices["explicit"]["method"]
            trials.append(
                ComponentTrials(self.source.store, self.stock, layouts, self._unchanged(), calibration, method)
            )
        if self.active is not None:
            trials.append(ActiveTrials(model, self.text.tokens(self.source, model, folder, progress)))
        losses = measure_losses(model, trials, tokens, partial(progress, "choosing"))
        return self.text.of_windows() | {"losses": by_layer(losses)} | self._choices(losses, layouts)

    def _unchanged(self) -> list[Counts]:
        """Return the component counts of each layer before the choice."""
        return [layer.counts() for layer in layer_requests(self.target, self.request)]

    def _choices(self, losses: Losses, layouts: list[HeadLayout]) -> dict[str, Any]:
        """Return the chosen numbers of heads, the parts of the budgets that they use, and the expected divergence."""
        chosen: dict[str, Any] = {}
        expected = 0.0
        if self.cache is not None:
            choice = choose(losses, layouts, self.cache, self.target.dtype or stored_dtype(self.source.store))
            chosen |= choice.heads | {"cache": round(choice.fraction, 6)}
            expected += choice.loss
        if self.active is not None:
            choice = choose_active(losses, layouts, self.active)
            chosen |= choice.heads | {"active": round(choice.fraction, 6)}
            expected += choice.loss
        return chosen | {"expected_divergence": round(expected, 6)}


def check_auto(request: MixerRequest, cache: float | None, active: float | None) -> None:
    """Raise `ConversionError` if a budget's mechanism is missing, or an option that is to be chosen is set."""
    for name, budget, option in (("explicit", cache, "--cache (or --layers auto)"), ("mixture", active, "--active")):
        mixer = request.mixers.get(name)
        if budget is None:
            continue
        if mixer is None:
            raise ConversionError(f"{option} chooses the heads of {name!r}: add --mixer {name}")
        for chosen in CHOSEN[name]:
            if chosen in mixer and not (name == "mixture" and chosen == "shared_heads" and mixer[chosen] == 0):
                raise ConversionError(f"{option} chooses mixers.{name}.{chosen}: omit one of the two")
    if active is not None and request.choices["mixture"]["method"] != "calibrated":
        raise ConversionError("--active fits routers to the text: use mixture with method=calibrated, its default")
